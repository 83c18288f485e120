"""Tensor -> Packet -> tensor: how a link spends its bytes."""
