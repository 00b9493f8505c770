//! What is done to a guest from outside, by QEMU's own control protocol.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

const CLOSED: &str = "QEMU has closed its control socket";

/// A connection to one QEMU.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and leaves the negotiation behind.
    pub(crate) fn connect(socket: &Path) -> Result<Self, String> {
        let open = || {
            let stream = UnixStream::connect(socket)?;
            // QEMU answers from its main loop, which a guest on a busy machine can hold up.
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            let lines = BufReader::new(stream.try_clone()?);
            io::Result::Ok(Self { stream, lines })
        };
        let mut qmp = open().map_err(|why| format!("{}: {why}", socket.display()))?;
        qmp.read()?;
        qmp.execute(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(qmp)
    }

    /// Sends a command and returns what it returns, or QEMU's refusal.
    pub(crate) fn execute(&mut self, command: &Value) -> Result<Value, String> {
        writeln!(self.stream, "{command}").map_err(|why| match why.kind() {
            io::ErrorKind::BrokenPipe => CLOSED.to_owned(),
            _ => why.to_string(),
        })?;
        loop {
            // Events come in between.
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(refusal) = answer.get("error") {
                return Err(format!("{command}: {refusal}"));
            }
        }
    }

    fn read(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => Err(CLOSED.to_owned()),
            // With a command that it did not read any more.
            Err(why) if why.kind() == io::ErrorKind::ConnectionReset => Err(CLOSED.to_owned()),
            Ok(_) => serde_json::from_str(&line).map_err(|why| format!("{line:?}: {why}")),
            Err(why) => Err(format!("no answer from QEMU: {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    use serde_json::json;

    use super::Qmp;

    #[test]
    fn answers_are_found_among_events() {
        let folder = std::env::temp_dir().join(format!("ntb-lab-qmp-{}", std::process::id()));
        let listener = UnixListener::bind(&folder).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            writeln!(stream, "{{\"QMP\": {{}}}}").unwrap();
            for answer in [
                "{\"return\": {}}",
                "{\"event\": \"RESET\"}\n{\"return\": 7}",
                "{\"error\": {\"class\": \"x\"}}",
            ] {
                lines.next().unwrap().unwrap();
                writeln!(stream, "{answer}").unwrap();
            }
        });
        let mut qmp = Qmp::connect(&folder).unwrap();
        assert_eq!(qmp.execute(&json!({ "execute": "one" })).unwrap(), json!(7));
        let refusal = qmp.execute(&json!({ "execute": "two" })).unwrap_err();
        assert!(refusal.contains("class"), "{refusal}");
        let end = qmp.execute(&json!({ "execute": "three" })).unwrap_err();
        assert!(end.contains("closed"), "{end}");
        server.join().unwrap();
        std::fs::remove_file(&folder).unwrap();
    }
}
