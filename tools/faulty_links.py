"""TCP links between ports of this machine that can be cut, and that can hold back all bytes for a while."""
import asyncio
import multiprocessing
import signal


class Links:
    """Links that are numbered from 0, in a process of their own: what else this program does delays them less."""

    def __init__(self, n):
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=run_links, args=(n, theirs, self.pipe), daemon=True)
        self.process.start()
        theirs.close()

    async def connect(self, number, port):
        """The port that leads to `port`."""
        self.pipe.send((number, port))
        return await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv)

    def set(self, number, state):
        """"open"; "cut": connections are closed, also new ones; "silent": what arrives is passed on when the link is open."""
        self.pipe.send((number, state))

    def end(self):
        self.pipe.close()
        self.process.join()


def run_links(n, pipe, other_end):
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(pass_on(n, pipe))


async def pass_on(n, pipe):
    links = [Link() for _ in range(n)]
    loop = asyncio.get_running_loop()
    commands = asyncio.Queue()

    def take():
        try:
            commands.put_nowait(pipe.recv())
        except EOFError:
            commands.put_nowait(None)
            loop.remove_reader(pipe.fileno())
    loop.add_reader(pipe.fileno(), take)
    while (command := await commands.get()) is not None:
        number, what = command
        if isinstance(what, str):
            links[number].set(what)
        else:
            pipe.send(await links[number].listen(what))


class Link:
    def __init__(self):
        self.state, self.sides, self.port, self.server = "open", set(), 0, None

    async def listen(self, port):
        self.port = port
        self.server = await asyncio.get_running_loop().create_server(lambda: Side(self), "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    def set(self, state):
        self.state = state
        for side in list(self.sides):
            side.follow()


class Side(asyncio.Protocol):
    """One end of a connection that is passed on. `other` is the other end, None until it is connected."""

    def __init__(self, link, other=None):
        self.link, self.other, self.transport, self.connects, self.task = link, other, None, other is not None, None

    def connection_made(self, transport):
        self.transport = transport
        self.link.sides.add(self)
        if self.other:
            self.other.other = self
            self.other.follow()
        self.follow()

    def follow(self):
        """Does what the state of the link asks for."""
        if self.link.state == "cut":
            self.transport.abort()
            return
        if self.link.state == "open" and not self.connects:
            self.connects = True
            self.task = asyncio.create_task(self.connect())
        if self.link.state == "open" and self.other:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    async def connect(self):
        try:
            await asyncio.get_running_loop().create_connection(lambda: Side(self.link, self), "127.0.0.1", self.link.port)
        except OSError:
            self.transport.abort()

    def data_received(self, data):
        self.other.transport.write(data)

    def connection_lost(self, exc):
        self.link.sides.discard(self)
        if self.other and self.other.transport:
            if exc:
                self.other.transport.abort()
            else:
                self.other.transport.close()
