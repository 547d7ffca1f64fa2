"""What verbs do on this machine or with traces: collect, emulate, verify, and questions about traced runs."""
