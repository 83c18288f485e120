"""Use of the environment's proxy by connections: one word for owners, workers and peers."""

from __future__ import annotations


def proxy_option(use_proxy: bool) -> tuple[str, int]:
    """gRPC's channel option for ``--use-proxy``.

    gRPC by itself heeds ``https_proxy`` and its kin, also for addresses of the own network: with a proxy in
    the environment a coordinator on the same machine would not be found. Ours connect directly unless told
    otherwise; then ``no_proxy`` excepts hosts as usual. TLS goes through a proxy end to end.
    """
    return ("grpc.enable_http_proxy", int(use_proxy))
