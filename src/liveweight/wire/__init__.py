"""Communication between processes: frames and messages, channels with deadlines, credentials, descriptors.

Owns the protocol between two processes. What the messages mean is for rounds/, worker/, trainer/ and engine/.
Nothing is re-exported, so that importing the package loads neither ZMQ nor msgspec.
"""
