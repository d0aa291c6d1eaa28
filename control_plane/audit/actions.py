"""The names of what the audit log records, and which method of the clients' port is which action."""

from __future__ import annotations

from collections.abc import Mapping

UPLOAD = "adapter.upload"
PUSH = "adapter.push"
VERIFY = "adapter.verify"
SEND_TASK = "lora_task.send"
CREATE = "adapter.create"
UPDATE = "adapter.update"
ACTIVATE = "adapter.activate"
ROLL_BACK = "adapter.roll_back"
PIN = "adapter.pin"
UNPIN = "adapter.unpin"
LOAD = "adapter.load"
UNLOAD = "adapter.unload"
DELETE = "adapter.delete"
DELETE_VERSION = "adapter.delete_version"
CANCEL_OPERATION = "operation.cancel"
DELETE_OPERATION = "operation.delete"
GENERATE = "generate"
EMBED = "embed"
CLASSIFY = "classify"
START = "server.start"
STOP = "server.stop"
RELOAD = "file.reload"
DRAIN = "worker.drain"
UNDRAIN = "worker.undrain"
ATTACH = "worker.attach"
END_SESSION = "worker.end"
SUPPRESSED = "refusals.suppressed"

# Methods that change something, by their paths. Each call of one has a line, whether it succeeds or not.
CHANGES: Mapping[str, str] = {
    "/motet.v1.AdapterService/UploadAdapter": UPLOAD,
    "/motet.v1.PushService/PushVersion": PUSH,
    "/motet.v1.VerificationService/VerifyVersion": VERIFY,
    "/motet.v1.GenerationService/GenerateWithTask": SEND_TASK,
    "/motet.v1.AdapterService/CreateAdapter": CREATE,
    "/motet.v1.AdapterService/UpdateAdapter": UPDATE,
    "/motet.v1.AdapterService/ActivateAdapterVersion": ACTIVATE,
    "/motet.v1.AdapterService/RollbackAdapter": ROLL_BACK,
    "/motet.v1.AdapterService/PinAdapter": PIN,
    "/motet.v1.AdapterService/UnpinAdapter": UNPIN,
    "/motet.v1.AdapterResidencyService/LoadAdapter": LOAD,
    "/motet.v1.AdapterResidencyService/UnloadAdapter": UNLOAD,
    "/motet.v1.AdapterService/DeleteAdapter": DELETE,
    "/motet.v1.AdapterService/DeleteAdapterVersion": DELETE_VERSION,
    "/motet.v1.FleetService/DrainWorker": DRAIN,
    "/motet.v1.FleetService/UndrainWorker": UNDRAIN,
    "/google.longrunning.Operations/CancelOperation": CANCEL_OPERATION,
    "/google.longrunning.Operations/DeleteOperation": DELETE_OPERATION,
}


_COMPUTING: Mapping[str, str] = {
    "/motet.v1.GenerationService/Generate": GENERATE,
    "/motet.v1.PoolingService/Embed": EMBED,
    "/motet.v1.PoolingService/Classify": CLASSIFY,
}


def action_of(method: str) -> str:
    """What the log calls a call of `method`, "/package.Service/Method": for a method that changes nothing, its name."""
    if method in CHANGES:
        return CHANGES[method]
    if method in _COMPUTING:
        return _COMPUTING[method]
    service, _, name = method.strip("/").rpartition("/")
    return f"{service.rpartition('.')[2]}/{name}"
