"""kvrail demo: moves the KV cache of a real model's shape between two NIXL agents and checks it."""
