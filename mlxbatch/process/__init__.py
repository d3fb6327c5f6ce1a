"""The engine as a process of its own, shared by all terminals of a user.

    paths, registry       where engines and clients meet; who holds how many bytes
    messages, frames      the protocol, and how it is cut into frames
    main, server, connection, service, served, driver, loading, idle, awake     the engine process
    link, launcher, session, status, client, async_client, stats, control       its clients
"""
