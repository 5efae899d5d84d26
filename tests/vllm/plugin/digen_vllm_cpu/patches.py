"""One method of the engine's worker process, which asks for the accelerator's type where there is no accelerator."""

from typing import Any

from vllm_omni.diffusion.worker import diffusion_worker as dw


def _async_output_loop(self: Any) -> None:
    while (item := self._async_output_queue.get()) is not None:
        output, number, _ = item
        ready = {"kind": dw.AsyncOutputKind.OUTPUT_READY, "async_output_id": number}
        try:
            dw.pack_diffusion_output_shm(output)
            message = dw.AsyncDiffusionOutput(**ready, output=output)
        except Exception as error:  # noqa: BLE001 - the request's caller is told
            message = dw.AsyncDiffusionOutput(**ready, error=f"packing failed: {error}")
        try:
            self._enqueue_result(message)
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


def apply() -> None:
    dw.WorkerProc._async_output_loop = _async_output_loop
