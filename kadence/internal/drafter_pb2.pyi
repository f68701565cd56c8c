from kadence.internal import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeDrafterRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Description
    def __init__(self, caller: _Optional[_Union[_common_pb2.Description, _Mapping]] = ...) -> None: ...

class DescribeDrafterResponse(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: _common_pb2.Description
    def __init__(self, drafter: _Optional[_Union[_common_pb2.Description, _Mapping]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("step", "closes", "opens", "commits", "proposes", "heartbeat")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    PROPOSES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    step: int
    closes: _containers.RepeatedCompositeFieldContainer[SessionClose]
    opens: _containers.RepeatedCompositeFieldContainer[SessionOpen]
    commits: _containers.RepeatedCompositeFieldContainer[SessionCommit]
    proposes: _containers.RepeatedCompositeFieldContainer[Propose]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, step: _Optional[int] = ..., closes: _Optional[_Iterable[_Union[SessionClose, _Mapping]]] = ..., opens: _Optional[_Iterable[_Union[SessionOpen, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[SessionCommit, _Mapping]]] = ..., proposes: _Optional[_Iterable[_Union[Propose, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ...) -> None: ...

class SessionCommit(_message.Message):
    __slots__ = ("stamp", "token_ids", "feature_rows", "feature_base", "feature_fingerprint")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BASE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    feature_rows: _common_pb2.Tensor
    feature_base: int
    feature_fingerprint: str
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., feature_rows: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., feature_base: _Optional[int] = ..., feature_fingerprint: _Optional[str] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("stamp", "max_tokens", "sampling")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    max_tokens: int
    sampling: _common_pb2.Sampling
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ...) -> None: ...

class SessionClose(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("step", "drafts", "resyncs", "compute_seconds", "heartbeat")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    step: int
    drafts: _containers.RepeatedCompositeFieldContainer[Draft]
    resyncs: _containers.RepeatedCompositeFieldContainer[Resync]
    compute_seconds: float
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, step: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[Draft, _Mapping]]] = ..., resyncs: _Optional[_Iterable[_Union[Resync, _Mapping]]] = ..., compute_seconds: _Optional[float] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("stamp", "token_ids", "q", "signals")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    q: SparseLaw
    signals: _common_pb2.Tensor
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[SparseLaw, _Mapping]] = ..., signals: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SparseLaw(_message.Message):
    __slots__ = ("token_ids", "probabilities")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _common_pb2.Tensor
    probabilities: _common_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., probabilities: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("stamp", "have")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    have: int
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., have: _Optional[int] = ...) -> None: ...

class FetchProjectionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchProjectionResponse(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _common_pb2.Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
