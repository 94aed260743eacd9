"""TensorRT engines from the graphs of a bundle. Building them needs no GPU; nothing here runs one."""
