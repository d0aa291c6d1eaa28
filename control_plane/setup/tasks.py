"""Builds what takes LoRA tasks from clients; called by server.py."""

from __future__ import annotations

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.adapters.tasks import LoraTasks
from control_plane.api.admin.task_requests import TaskRequests
from control_plane.api.admin.upload import UploadReceiver
from control_plane.audit.audit_log import AuditLog
from control_plane.config import ServerConfig
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.task_cache import TaskCache
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports


def open_tasks(
    config: ServerConfig,
    cache: TaskCache,
    life_cycle: AdapterLifeCycle,
    fleet: Fleet,
    reports: WorkerReports,
    base_model: BaseModel,
    uploads: UploadReceiver,
    audit: AuditLog,
) -> TaskRequests:
    """LoRA tasks for the generation service."""
    tasks = LoraTasks(cache=cache, life_cycle=life_cycle, fleet=fleet, reports=reports, base_model=base_model)
    return TaskRequests(tasks, uploads, max_adapter_bytes=config.max_adapter_bytes, audit=audit)
