"""The backend of one host: the native engine on shared memory."""
