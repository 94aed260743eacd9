"""A decoder description and its weights, lowered to ONNX graphs."""
