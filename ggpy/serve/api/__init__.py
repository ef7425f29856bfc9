"""The APIs: each reads its requests and writes its answers; none knows HTTP or the engine."""
