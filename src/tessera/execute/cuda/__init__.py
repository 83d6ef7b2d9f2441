"""GPUs: one worker process per device, one CUDA graph per microbatch and program, transfers inside."""
