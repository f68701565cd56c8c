from kadence.internal import common_pb2 as _common_pb2
from kadence.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeVerifierRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Description
    def __init__(self, caller: _Optional[_Union[_common_pb2.Description, _Mapping]] = ...) -> None: ...

class DescribeVerifierResponse(_message.Message):
    __slots__ = ("verifier",)
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    verifier: _common_pb2.Description
    def __init__(self, verifier: _Optional[_Union[_common_pb2.Description, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("submits", "stops", "heartbeat", "scheduler_id")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    stops: _containers.RepeatedCompositeFieldContainer[Stop]
    heartbeat: _common_pb2.Heartbeat
    scheduler_id: str
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., stops: _Optional[_Iterable[_Union[Stop, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., scheduler_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stamp", "prompt_token_ids", "committed_token_ids", "sampling", "tenant")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    tenant: str
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("step", "updates", "heartbeat")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    step: int
    updates: _containers.RepeatedCompositeFieldContainer[RequestUpdate]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, step: _Optional[int] = ..., updates: _Optional[_Iterable[_Union[RequestUpdate, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class RequestUpdate(_message.Message):
    __slots__ = ("stamp", "token_ids", "drafted", "verified", "accepted", "decode_step", "terminal", "cached_tokens", "logprobs")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: int
    verified: int
    accepted: int
    decode_step: bool
    terminal: Terminal
    cached_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[int] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., decode_step: bool = ..., terminal: _Optional[_Union[Terminal, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("reason", "stop_token_id", "error_code", "error_message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    stop_token_id: int
    error_code: str
    error_message: str
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...
