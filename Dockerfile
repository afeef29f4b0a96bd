# megalite and its dependencies, at the versions in requirements.lock.
#
#   docker build -t megalite .                                                                   for GPUs
#   docker build -t megalite:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .  for CPUs
#
# torch brings its CUDA libraries, so the base has none. The host needs NVIDIA's driver and container toolkit.
FROM python:3.11-slim

# For --compile, which generates C++.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /megalite
# What decides the dependencies, first: a change of the code doesn't install them again.
COPY setup.py pyproject.toml requirements.lock LICENSE ./
COPY megalite/__init__.py megalite/
# A wheel for CPUs has a suffix, +cpu, and pip takes it before PyPI's.
ARG TORCH_INDEX=
RUN PIP_EXTRA_INDEX_URL=$TORCH_INDEX && export PIP_EXTRA_INDEX_URL \
    && pip install --no-cache-dir -c requirements.lock setuptools \
    && pip install --no-cache-dir -c requirements.lock --no-build-isolation -e .

COPY . .
