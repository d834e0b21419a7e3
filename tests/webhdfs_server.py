"""Hadoop's own name node and data node on loopback, which speak WebHDFS.

They are started from the jars in the directories and files of HETERO_TEST_HADOOP_CLASSPATH, as
`java -cp` takes them: those of any Hadoop 2.7 or later, `hadoop-hdfs` and what it needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tests.storage_server import BUCKET, StorageServer, die_with_tests

CLASSPATH_VARIABLE = "HETERO_TEST_HADOOP_CLASSPATH"
_OPEN = ("lang", "util", "net", "nio")
_PROBE_TIMEOUT_S = 10.0
_FORMAT_TIMEOUT_S = 60.0
_NODES = "org.apache.hadoop.hdfs.server"
_WEB_APP = '<?xml version="1.0"?><web-app xmlns="http://java.sun.com/xml/ns/j2ee"></web-app>'
_LOGGING = """log4j.rootLogger=WARN,c
log4j.appender.c=org.apache.log4j.ConsoleAppender
log4j.appender.c.layout=org.apache.log4j.SimpleLayout
"""


def find_hadoop() -> str | None:
    """The class path; None if it is not given or there is no Java."""
    return os.environ.get(CLASSPATH_VARIABLE) if shutil.which("java") else None


class WebHdfsServer(StorageServer):
    """A name node, which clients know, and one data node."""

    scheme = "webhdfs"

    def __init__(self, folder: Path, class_path: str) -> None:
        super().__init__(folder, num_ports=5)
        web, rpc, data, data_web, data_rpc = self._ports
        self._data_node: subprocess.Popen[bytes] | None = None
        conf = folder / "conf"
        for name in ("hdfs", "datanode", "static"):
            (conf / "webapps" / name / "WEB-INF").mkdir(parents=True)
            (conf / "webapps" / name / "WEB-INF" / "web.xml").write_text(_WEB_APP)
        (conf / "log4j.properties").write_text(_LOGGING)
        settings = {
            "fs.defaultFS": f"hdfs://127.0.0.1:{rpc}",
            "hadoop.tmp.dir": str(folder / "data"),
            "dfs.replication": "1",
            "dfs.namenode.http-address": f"127.0.0.1:{web}",
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.datanode.http.address": f"127.0.0.1:{data_web}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{data_rpc}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        }
        lines = [
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in settings.items()
        ]
        for name in ("core-site.xml", "hdfs-site.xml"):
            (conf / name).write_text(f"<configuration>{''.join(lines)}</configuration>")
        opened = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPEN]
        self._java = ["java", *opened, "-Xmx384m", "-cp", f"{conf}:{class_path}"]
        subprocess.run(
            [*self._java, f"{_NODES}.namenode.NameNode", "-format", "-force"],
            check=True,
            capture_output=True,
            timeout=_FORMAT_TIMEOUT_S,
        )

    @property
    def environment(self) -> dict[str, str]:
        return {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

    def root(self, endpoint: str | None = None) -> str:
        return f"webhdfs://{(endpoint or self.endpoint).removeprefix('http://')}/{BUCKET}"

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        return {"user": "root"}

    def command(self) -> list[str]:
        return [*self._java, f"{_NODES}.namenode.NameNode"]

    def start(self) -> None:
        if self._data_node is None:
            with (self._folder / "data-node-log").open("ab") as log:
                self._data_node = subprocess.Popen(
                    [*self._java, f"{_NODES}.datanode.DataNode"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_tests,
                )
        super().start()

    def close(self) -> None:
        super().close()
        if self._data_node is not None:
            self._data_node.kill()
            self._data_node.wait(10.0)

    def probe(self) -> None:
        """It can be written when the data node has reported."""
        place = (
            f"{self.endpoint}/webhdfs/v1/{BUCKET}/.probe?op=CREATE&overwrite=true&user.name=root"
        )
        request = urllib.request.Request(place, method="PUT")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _FollowingPut())
        opener.open(request, timeout=_PROBE_TIMEOUT_S).close()


class _FollowingPut(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, *others: Any) -> urllib.request.Request:
        return urllib.request.Request(others[-1], data=b"up", method="PUT")
