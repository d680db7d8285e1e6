def cross_check_metadata(folder, config, modules):
    return []
