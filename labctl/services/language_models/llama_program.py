"""Serves a GGUF model with llama.cpp's own server, from the package xllamacpp.

labctl passes this text to the Python of the service's image. Its argument is JSON: the file, or its
repository on the hub; the context, the number of sequences and the port. Each sequence has the
whole context.
"""

import json
import os
import sys
import time
from pathlib import Path

import huggingface_hub
import xllamacpp


def find_file(repository: str, file: str) -> str:
    return str(huggingface_hub.hf_hub_download(repository, file)) if repository else file


def main() -> None:
    options = json.loads(sys.argv[1])
    Path("/tmp/slots").mkdir(exist_ok=True)
    params = xllamacpp.CommonParams()
    params.model.path = find_file(options["repository"], options["file"])
    params.model_alias = [options["name"]]
    params.n_ctx = options["context"] * options["sequences"]
    params.n_parallel = options["sequences"]
    params.kv_unified = False
    # More threads than processors wait for each other in loops that take processor time.
    params.cpuparams.n_threads = options["threads"] or len(os.sched_getaffinity(0))
    # Otherwise the cache shrinks to what llama.cpp takes to fit, and a prompt of the chosen length
    # is refused.
    params.fit_params = False
    params.cache_ram_mib = 0
    params.hostnames = ["127.0.0.1"]
    params.port = options["port"]
    params.endpoint_metrics = True
    params.slot_save_path = "/tmp/slots/"
    params.sampling.seed = 0
    server = xllamacpp.Server(params)
    print(f"llama.cpp serves {params.model.path} at {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


main()
