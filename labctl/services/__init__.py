"""Services on a server (TensorBoard, Jupyter, a served model), and the forwards to them.

`services` starts them, `port_forward` is one local port of a service, `background_forwards` manages
background forwards, `several_forwards` opens several side by side, `lab_services` applies lab.yaml,
`model_serving` is `labctl serve`; `model_server/` is the program that serves a model in its
container, and imports nothing of labctl but `wire`.

May import: runs, sync, stores, servers and the layers below.
"""
