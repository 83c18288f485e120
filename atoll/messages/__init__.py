"""Messages between a coordinator and its workers, as both handle them: frozen, bounded, without protobuf."""
