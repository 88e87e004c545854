"""vLLM as a sampler.

`sampler` speaks the sampler protocol, `server` is vLLM behind HTTP, and `worker` runs inside vLLM.
"""
