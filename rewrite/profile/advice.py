def derive(record, lock):
    return []
