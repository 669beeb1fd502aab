import json
import os

fd = int(os.environ["HORA_TOKEN_FD"])
token = os.read(fd, 64)
names = [name for name in os.environ if name.startswith(("HORA_", "OMP_", "PYTHONUNBUF"))]
print(json.dumps({"token": token.hex(), **{name: os.environ[name] for name in names}}))
