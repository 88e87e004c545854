# Grouper on NVIDIA GPUs. Not built where Grouper is developed: its lines are checked by
# tests/end_to_end/test_project_files.py only.
#
#   docker build --tag grouper .
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" --volume "$PWD:/work" grouper run demo
#
# PyTorch brings its own CUDA libraries, so the image without CUDA's runtime is enough.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# The compilers build the kernels: Triton's for the GPU, Grouper's own for the CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Any user may write here: `docker run --user` starts as one that the image does not know.
RUN useradd --uid 10001 --create-home grouper \
    && mkdir --mode 1777 /work /cache \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/cache HF_HOME=/cache/huggingface GROUPER_CACHE=/cache/grouper

# PyTorch first: the largest layer, and one that changes with none of our own files.
ARG TORCH=torch==2.13.0
COPY constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt "$TORCH"

ARG EXTRAS=gguf,quantized,tensorboard
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir --constraint /src/constraints.txt "/src[$EXTRAS]"

USER grouper
WORKDIR /work
ENTRYPOINT ["grouper"]
CMD ["--help"]
