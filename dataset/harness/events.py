def measure_events(event, device, say):
    return {"records": []}
