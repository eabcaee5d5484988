"""Attacks on the sandbox: each is a function ``f(target)`` that returns a text starting with "breached" when it got its way.

``target`` describes what is there to be attacked: files, sockets, processes of the grader's user. Whether an attack had an effect
outside is checked from outside as well (`battery.py`).
"""

# ruff: noqa: E501 - one attack, one line
from __future__ import annotations

from dataclasses import dataclass, replace

from longreach.rewards.sandbox import Limits

_PRELUDE = '''
import os, sys, ctypes
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def call(x86, arm, *args):
    """A raw system call; says "breached" when it is carried out."""
    result = libc.syscall(x86 if X86 else arm, *args)
    return f"breached: {result}" if result >= 0 else f"refused: {ctypes.get_errno()}"
def attempt(*actions):
    """Run each; report the first that works."""
    said = []
    for action in actions:
        try:
            value = action()
        except BaseException as error:
            said.append(type(error).__name__)
        else:
            if not (isinstance(value, str) and value.startswith("refused")):
                return f"breached: {value!r}"
            said.append(value)
    return ", ".join(said)
'''


AMPLE = Limits(cpu_s=30, wall_s=60, memory_bytes=256 << 20, denials=100)


@dataclass(frozen=True)
class Attack:
    """``ends`` lists the failures an attack may end in; by default it must come back and report that it was refused."""

    name: str
    kind: str
    source: str
    ends: tuple[str, ...] = ("",)

    @property
    def limits(self) -> Limits:
        """Little time only where time is what it must run out of: on a busy machine too it then meets the limit it is about."""
        if "wall" in self.ends:
            return replace(AMPLE, cpu_s=1, wall_s=0.8)
        return replace(AMPLE, cpu_s=1) if "cpu" in self.ends else AMPLE


def _attack(kind: str, name: str, body: str, *ends: str) -> Attack:
    indented = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return Attack(name, kind, f"{_PRELUDE}\ndef f(target):\n{indented}\n", ends or ("",))


_SIMPLE = {
    "files": {
        "read the grader's file": 'return attempt(lambda: open(target["secret"]).read())',
        "read /etc/passwd": 'return attempt(lambda: open("/etc/passwd").read(5))',
        "read the project's own sources": 'return attempt(lambda: open(target["source"]).read(5))',
        "read through a relative path": """
            deep = "/".join([os.path.dirname(os.__file__)] + [".."] * 40) + target["secret"]
            return attempt(lambda: open(deep).read())""",
        "list the grader's directory": 'return attempt(lambda: os.listdir(target["writable"]))',
        "write a file": 'return attempt(lambda: open(target["writable"] + "/new", "w"), lambda: open("/tmp/longreach-new", "w"))',
        "write to shared memory": 'return attempt(lambda: open("/dev/shm/longreach-new", "w"))',
        "append to the standard library": 'return attempt(lambda: open(os.__file__, "a"))',
        "truncate": 'return attempt(lambda: os.truncate(target["secret"], 0))',
        "delete": 'return attempt(lambda: os.unlink(target["secret"]), lambda: os.rename(target["secret"], target["secret"] + "x"))',
        "link": 'return attempt(lambda: os.symlink("/", target["writable"] + "/s"), lambda: os.link(target["secret"], target["writable"] + "/h"))',
        "change modes": 'return attempt(lambda: os.chmod(target["secret"], 0o777), lambda: os.chown(target["secret"], 0, 0), lambda: os.utime(target["secret"]))',
        "make a directory or a pipe": 'return attempt(lambda: os.mkdir(target["writable"] + "/d"), lambda: os.mkfifo(target["writable"] + "/p"))',
        "open by handle": "return call(304, 265, -100, ctypes.create_string_buffer(128), 0)",
        "open for the path alone": 'return attempt(lambda: os.open("/etc", 0x200000), lambda: os.open(target["secret"], 0x200000))',
        "map the library for writing": """
            import mmap
            return attempt(lambda: mmap.mmap(os.open(os.__file__, os.O_RDONLY), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE))""",
        "lock what others use": "import fcntl\nreturn attempt(lambda: fcntl.flock(0, fcntl.LOCK_EX))",
        "open a device": 'return attempt(lambda: open("/dev/tty"), lambda: open("/dev/kmsg"), lambda: open("/dev/mem", "rb"))',
    },
    "proc": {
        "read the parent's environment": 'return attempt(*[lambda p=p: open(f"/proc/{p}/environ").read() for p in (target["grader"], os.getppid())])',
        "read the parent's memory": 'return attempt(*[lambda p=p: open(f"/proc/{p}/mem", "rb") for p in (target["grader"], os.getppid())])',
        "read another's command line": "return attempt(lambda: open(f\"/proc/{target['victim']}/cmdline\").read())",
        "list processes": 'return attempt(lambda: os.listdir("/proc"))',
        "follow /proc links": "return attempt(lambda: os.readlink(f\"/proc/{target['victim']}/cwd\"), lambda: open(f\"/proc/{target['grader']}/root/etc/passwd\").read(4))",
        "change the kernel's settings": 'return attempt(lambda: open("/proc/sys/kernel/core_pattern", "w"), lambda: open("/proc/self/oom_score_adj", "w"))',
    },
    "signals": {
        "kill": 'return attempt(*[lambda p=p: os.kill(p, 9) for p in (target["victim"], target["zygote"], target["grader"], os.getppid()) if p > 1])',
        "kill everybody": "return attempt(lambda: os.kill(-1, 9), lambda: os.killpg(0, 9))",
        "thread kill": 'return attempt(lambda: call(234, 131, target["victim"], target["victim"], 9), lambda: call(200, 130, target["victim"], 9))',
        "queue a signal": 'return call(129, 138, target["victim"], 9, ctypes.create_string_buffer(128))',
        "pidfd": 'return attempt(lambda: call(434, 434, target["victim"], 0))',
        "have the kernel signal for us": """
            import fcntl
            return attempt(lambda: fcntl.fcntl(3, fcntl.F_SETOWN, target["victim"]), lambda: fcntl.fcntl(3, 10, 9),
                           lambda: fcntl.fcntl(3, fcntl.F_SETFL, os.O_ASYNC),
                           lambda: fcntl.ioctl(3, 0x8901, target["victim"].to_bytes(4, "little")))""",
    },
    "network": {
        "connect over TCP": """
            import socket
            return attempt(lambda: socket.create_connection(("127.0.0.1", target["port"]), 1).recv(9))""",
        "send a datagram": """
            import socket
            return attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", target["port"])))""",
        "connect to a Unix socket": """
            import socket
            return attempt(lambda: socket.socket(socket.AF_UNIX).connect(target["unix"]),
                           lambda: socket.socket(socket.AF_UNIX).connect("\\0" + target["abstract"]))""",
        "socket pair": "import socket\nreturn attempt(lambda: socket.socketpair())",
        "netlink and raw sockets": "import socket\nreturn attempt(lambda: socket.socket(16, 3, 0), lambda: socket.socket(17, 3, 3), lambda: socket.socket(40, 1, 0))",
        "send over the channel's socket": """
            class M(ctypes.Structure):
                _fields_ = [(n, ctypes.c_size_t) for n in ("a", "b", "c", "d", "e", "g", "h")]
            return attempt(lambda: call(46, 211, 3, ctypes.byref(M()), 0), lambda: call(47, 212, 3, ctypes.byref(M()), 0x40))""",
    },
    "processes": {
        "exec": 'return attempt(lambda: os.execv("/bin/sh", ["sh", "-c", "true"]), lambda: os.execv(sys.executable or "/bin/true", ["x"]))',
        "subprocess": 'import subprocess\nreturn attempt(lambda: subprocess.run(["true"]), lambda: os.system("true") and 1 / 0)',
        "fork": "return attempt(os.fork, os.forkpty)",
        "clone by hand": "return attempt(lambda: call(56, 220, 17, 0, 0, 0, 0), lambda: call(435, 435, ctypes.create_string_buffer(88), 88), lambda: call(58, 220, 0x4111, 0))",
        "thread": "import threading\nreturn attempt(threading.Thread(target=int).start)",
        "exec from memory": 'return attempt(lambda: call(319, 279, b"x", 0), lambda: call(322, 281, 3, b"", 0, 0, 0x1000))',
    },
    "debugging": {
        "ptrace": 'return attempt(lambda: call(101, 117, 16, target["victim"], 0, 0), lambda: call(101, 117, 0, 0, 0, 0))',
        "read another's memory": 'return attempt(lambda: call(310, 270, target["grader"], 0, 0, 0, 0, 0), lambda: call(311, 271, target["victim"], 0, 0, 0, 0, 0))',
        "take another's descriptor": "return call(438, 438, 0, 0, 0)",
        "compare kernel objects": 'return call(312, 272, target["victim"], target["grader"], 0, 0, 0)',
    },
    "kernel": {
        "io_uring": "return attempt(lambda: call(425, 425, 8, ctypes.create_string_buffer(120)), lambda: call(426, 426, 3, 1, 0, 0, 0, 0))",
        "nested namespaces": "return attempt(lambda: call(272, 97, 0x10000000), lambda: call(272, 97, 0x00020000), lambda: call(308, 268, 3, 0))",
        "mount and pivot": 'return attempt(lambda: call(165, 40, b"x", b"/", b"tmpfs", 0, 0), lambda: call(155, 41, b".", b"."), lambda: call(166, 39, b"/", 2))',
        "change the root": 'return attempt(lambda: os.chroot("/"), lambda: os.chdir("/tmp"), lambda: os.fchdir(3))',
        "bpf and perf": "return attempt(lambda: call(321, 280, 0, 0, 0), lambda: call(298, 241, 0, 0, -1, -1, 0), lambda: call(323, 282, 1))",
        "keyrings": 'return attempt(lambda: call(250, 219, 0, -3, 1), lambda: call(248, 217, b"user", b"x", b"y", 1, -3))',
        "become another user": "return attempt(lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]))",
        "regain capabilities": "return attempt(lambda: call(126, 91, ctypes.create_string_buffer(b'\\x22\\x05\\x08\\x20' + bytes(4)), ctypes.create_string_buffer(b'\\xff' * 24)), lambda: call(157, 167, 47, 2, 0, 0, 0))",
        "loosen the filter": "return attempt(lambda: call(317, 277, 1, 0, 0), lambda: call(157, 167, 22, 2, 0, 0, 0), lambda: call(444, 444, 0, 0, 1))",
        "system V shared memory": "return attempt(lambda: call(29, 194, 7, 4096, 0o1666), lambda: call(68, 186, 7, 0o1666), lambda: call(64, 190, 7, 1, 0o1666))",
        "execution domain": "return call(135, 92, 0x0040000)",
        "memory locks and priorities": "return attempt(lambda: call(151, 230, 3), lambda: os.setpriority(0, 0, -5), lambda: os.nice(-5))",
    },
    "the grader's limits": {
        "prlimit": "import resource\nreturn attempt(*[lambda p=p: resource.prlimit(p, resource.RLIMIT_NOFILE, (3, 3)) for p in (target['grader'], target['zygote'], target['victim'])])",
        "raise its own": "import resource\nreturn attempt(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (99, 99)), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)), lambda: resource.setrlimit(resource.RLIMIT_CPU, (99999, 99999)))",
        "affinity of the grader": "return attempt(lambda: os.sched_setaffinity(target['grader'], {0}), lambda: os.sched_setaffinity(target['victim'], {0}), lambda: os.sched_setscheduler(target['victim'], 3, os.sched_param(0)))",
    },
    "secrets": {
        "environment": 'return "breached" if any("SECRET" in k or target["hint"] in v for k, v in os.environ.items()) else "none"',
        "objects of the grader": """
            import gc
            hint = target["hint"]
            seen = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and o is not target
                    and any(isinstance(x, str) and hint in x and x != hint for x in (o.values() if isinstance(o, dict) else o))]
            seen = [o for o in seen if not (isinstance(o, dict) and o.get("hint") == hint)]
            return "breached" if seen or "longreach" in sys.modules or "torch" in sys.modules else "none"
            """,
        "frames of the grader": """
            frame, names = sys._getframe(), []
            while frame:
                names.append(frame.f_code.co_filename)
                found = [k for k in frame.f_locals if k in ("expected", "answer_key", "tests", "inputs", "reference")]
                if found: return f"breached: {found}"
                frame = frame.f_back
            return "none"
            """,
        "inherited descriptors": """
            opened = []
            for fd in range(3, 4096):
                try: os.fstat(fd)
                except OSError: continue
                opened.append(fd)
            return "none" if opened == [3] else f"breached: {opened}"
            """,
    },
}

_BOMBS = [
    _attack("limits", "memory bomb", "x = []\nwhile True: x.append(bytearray(1 << 24))", "memory", "died"),
    _attack("limits", "one huge allocation", "return len(bytearray(1 << 40))", "memory", "exception"),
    _attack("limits", "CPU bomb", "while True: pass", "cpu", "wall"),
    _attack(
        "limits",
        "CPU bomb that ignores signals",
        "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        "cpu",
        "wall",
    ),
    _attack("limits", "sleep", "import time\ntime.sleep(60)", "wall"),
    _attack(
        "limits", "stop itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nreturn 'went on'", "wall", ""
    ),
    _attack(
        "limits",
        "fork bomb",
        "made = 0\nfor _ in range(150):\n    try:\n        os.fork(); made += 1\n    except OSError: pass\nreturn f'breached: {made}' if made else 'refused'",
        "denials",
    ),
    _attack(
        "limits",
        "thread bomb",
        "import threading\nmade = 0\nfor _ in range(50):\n    try:\n        threading.Thread(target=print).start(); made += 1\n    except RuntimeError: pass\nreturn f'breached: {made}' if made else 'refused'",
    ),
    _attack(
        "limits",
        "descriptor bomb",
        "made = 0\ntry:\n    while True:\n        os.dup(3); made += 1\nexcept OSError: pass\nreturn f'breached: {made}' if made > 64 else 'refused'",
    ),
    _attack("limits", "output bomb", "return 'x' * (1 << 26)", "output", "memory"),
    _attack(
        "limits",
        "log bomb",
        "import os\nfor _ in range(2000): os.write(1, b'x' * (1 << 16)); os.write(2, b'x' * (1 << 16))\nreturn 'nothing kept'",
    ),
    _attack(
        "limits",
        "deep recursion",
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef g(): return g()\nreturn g()",
        "died",
        "exception",
        "memory",
        "cpu",
        "wall",
    ),
    _attack("limits", "endless integer", "return 9 ** 9 ** 9", "cpu", "wall", "memory"),
    _attack(
        "limits",
        "pile of refused calls",
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "denials",
        "cpu",
        "wall",
    ),
    _attack("death", "exit", "os._exit(0)", "died"),
    _attack("death", "sys.exit", "sys.exit(0)", "exception"),
    _attack("death", "kill itself", "os.kill(os.getpid(), 9)\nos._exit(9)", "died"),
    _attack("death", "abort", "os.abort()", "died"),
    _attack("death", "crash", "ctypes.string_at(0)", "died"),
    _attack("death", "close the channel and stay", "os.close(3)\nwhile True: pass", "died", "cpu"),
    Attack(
        "answer before the question",
        "forgery",
        "import os\nos.write(3, bytes(21))\ndef f(target): return 1",
        ("protocol",),
    ),
    _attack("forgery", "answer twice", "os.write(3, bytes(21))\nreturn 'breached'", "protocol"),
    _attack(
        "forgery",
        "length that lies",
        "import struct\nframe = sys._getframe(1)\nwhile 'nonce' not in frame.f_locals: frame = frame.f_back\nos.write(3, struct.pack('<16sBI', frame.f_locals['nonce'], 0, 0xFFFFFFFF))\nreturn 1",
        "output",
        "protocol",
    ),
    _attack(
        "forgery",
        "answer that is no value",
        "import struct\nframe = sys._getframe(1)\nwhile 'nonce' not in frame.f_locals: frame = frame.f_back\nbody = b'\\xff' * 64\nos.write(3, struct.pack('<16sBI', frame.f_locals['nonce'], 0, len(body)) + body)\nos._exit(0)",
        "protocol",
        "died",
    ),
    _attack(
        "forgery",
        "object that runs on arrival",
        "class P:\n    def __reduce__(self): return (os.system, ('touch ' + target['writable'] + '/pickled',))\nreturn P()",
        "exception",
    ),
    _attack(
        "forgery",
        "object that equals everything",
        "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\nreturn E(7)",
        "",
    ),
]

_X86_ONLY = {
    "kernel": {
        "32-bit system calls": """
            import mmap
            code = mmap.mmap(-1, 4096, prot=7)
            code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
            address = ctypes.addressof(ctypes.c_char.from_buffer(code))
            return f"breached: {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"
            """,
        "x32 system calls": "return call(0x40000000 | 39, 0)",
    },
}


def attacks(machine: str) -> list[Attack]:
    """All attacks that this machine can run."""
    import textwrap

    found = [
        _attack(kind, name, textwrap.dedent(body) if body.startswith("\n") else body)
        for kind, group in _SIMPLE.items()
        for name, body in group.items()
    ]
    if machine == "x86_64":
        for name, body in _X86_ONLY["kernel"].items():
            found.append(_attack("kernel", name, textwrap.dedent(body) if body.startswith("\n") else body, "died"))
    return found + _BOMBS
