from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainBatchRequest(_message.Message):
    __slots__ = ("tenant", "batch_key", "examples")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BATCH_KEY_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    batch_key: str
    examples: _containers.RepeatedCompositeFieldContainer[Example]
    def __init__(self, tenant: _Optional[str] = ..., batch_key: _Optional[str] = ..., examples: _Optional[_Iterable[_Union[Example, _Mapping]]] = ...) -> None: ...

class Example(_message.Message):
    __slots__ = ("id", "json")
    ID_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    id: int
    json: str
    def __init__(self, id: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...

class TrainBatchResponse(_message.Message):
    __slots__ = ("accepted", "rejected")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejection]
    def __init__(self, accepted: _Optional[_Iterable[int]] = ..., rejected: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    reason: str
    def __init__(self, id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("tenant", "features")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("probabilities", "examples_seen")
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_SEEN_FIELD_NUMBER: _ClassVar[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    examples_seen: int
    def __init__(self, probabilities: _Optional[_Iterable[float]] = ..., examples_seen: _Optional[int] = ...) -> None: ...
