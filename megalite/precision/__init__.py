"""Number-format policies and the loss scaler."""
