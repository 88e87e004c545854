"""Compare steps, sampling and kernels on a CPU, beside other engines and with parts of them off."""
