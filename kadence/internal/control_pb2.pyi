from kadence.internal import common_pb2 as _common_pb2
from kadence.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("register", "load", "outcomes", "heartbeat", "draining")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    register: Register
    load: Load
    outcomes: OutcomeBatch
    heartbeat: _common_pb2.Heartbeat
    draining: Draining
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., outcomes: _Optional[_Union[OutcomeBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("description", "address", "metrics_address", "pid", "held_policy")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HELD_POLICY_FIELD_NUMBER: _ClassVar[int]
    description: _common_pb2.Description
    address: str
    metrics_address: str
    pid: int
    held_policy: Policy
    def __init__(self, description: _Optional[_Union[_common_pb2.Description, _Mapping]] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., held_policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "outstanding_tokens", "kv_pages_used", "kv_pages_total", "stats", "steps", "step_seconds", "policy_epoch", "drafter", "drafter_problem")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    outstanding_tokens: int
    kv_pages_used: int
    kv_pages_total: int
    stats: _types_pb2.GenerationStats
    steps: int
    step_seconds: float
    policy_epoch: PolicyEpoch
    drafter: str
    drafter_problem: str
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., kv_pages_used: _Optional[int] = ..., kv_pages_total: _Optional[int] = ..., stats: _Optional[_Union[_types_pb2.GenerationStats, _Mapping]] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., policy_epoch: _Optional[_Union[PolicyEpoch, _Mapping]] = ..., drafter: _Optional[str] = ..., drafter_problem: _Optional[str] = ...) -> None: ...

class OutcomeBatch(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("stamp", "tenant", "drafted", "verified", "accepted", "signals", "temperature", "rule")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    tenant: str
    drafted: int
    verified: int
    accepted: int
    signals: _common_pb2.Tensor
    temperature: float
    rule: _types_pb2.Rule
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., tenant: _Optional[str] = ..., drafted: _Optional[int] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., signals: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., temperature: _Optional[float] = ..., rule: _Optional[_Union[_types_pb2.Rule, str]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("registered", "policy", "drafters", "heartbeat")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    policy: Policy
    drafters: Peers
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., drafters: _Optional[_Union[Peers, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("scheduler_id", "heartbeat_seconds")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    heartbeat_seconds: float
    def __init__(self, scheduler_id: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("replica_id", "address")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PolicyEpoch(_message.Message):
    __slots__ = ("boot_id", "counter")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    counter: int
    def __init__(self, boot_id: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("epoch", "name", "max_draft_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: PolicyEpoch
    name: str
    max_draft_tokens: int
    def __init__(self, epoch: _Optional[_Union[PolicyEpoch, _Mapping]] = ..., name: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...
