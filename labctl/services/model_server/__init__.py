"""What serves a trained model over HTTP, inside a container on the server: `labctl serve`.

It is sent there as files and imports nothing else of labctl. The project that trained the model
says how it is loaded (project.py); everything that a stranger can send is bounded here.
"""
