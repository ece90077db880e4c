"""Images: safe decoding, labelled sets, batches, and the packaged sample."""
