# ECRM for machines without a GPU. docs/operations/install.md has the use: docker build -t ecrm .

FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY kernels kernels
COPY ecrm ecrm
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.lock /
COPY --from=build /wheels /wheels
ENV PIP_CONSTRAINT=/requirements.lock PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# PIP_CONSTRAINT gives the versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --find-links /wheels 'ecrm[rich,tables,tensorboard]' \
    && pip install --no-cache-dir --no-deps 'torchrec>=1.7,<2'
WORKDIR /work
CMD ["ecrm", "doctor"]
