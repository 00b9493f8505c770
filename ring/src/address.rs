//! Addresses of links: `ntb:0000:81:00.0`, `emu:PATH` or `emu:@NAME`, `soft:NAME`, `rdma:HOST:PORT`, `tcp:HOST:PORT`,
//! `auto[:HOST:PORT]`.

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A soft link: two processes of this machine meet under a name.
    Soft(String),
    /// A bridge, by PCI address.
    Ntb(String),
    /// An emulated bridge, by socket path; `@NAME` for an abstract socket.
    Emulated(String),
    /// RDMA, by host and port, and what follows a comma: [`crate::link::rdma::RdmaOptions::with`] reads it.
    Rdma(String, u16, String),
    /// TCP, by host and port.
    Tcp(String, u16),
    /// The best there is, with a rendezvous where one is given.
    Auto(Option<(String, u16)>),
}

/// Text that is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is no link address: {why}; one of soft:NAME, ntb:BUS:DEV.FN, emu:PATH, rdma:HOST:PORT, tcp:HOST:PORT, \
     auto[:HOST:PORT] is needed"
)]
pub struct AddressError {
    /// What was given.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl std::str::FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = |why| AddressError {
            text: text.to_owned(),
            why,
        };
        let (kind, rest) = match text.split_once(':') {
            Some((kind, rest)) => (kind, Some(rest)),
            None => (text, None),
        };
        let rest_or = |why| rest.filter(|r| !r.is_empty()).ok_or_else(|| bad(why));
        let host_port = |text: &str| -> Result<(String, u16), AddressError> {
            let (host, port) = text.rsplit_once(':').ok_or_else(|| bad("the port is missing"))?;
            let port = port
                .parse()
                .ok()
                .filter(|p| *p > 0)
                .ok_or_else(|| bad("the port is not 1 to 65535"))?;
            if host.is_empty() {
                return Err(bad("the host is missing"));
            }
            // Else the last part of one would be taken for the port.
            if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
                return Err(bad("an IPv6 address stands in brackets, as in [::1]:9000"));
            }
            Ok((
                host.trim_start_matches('[').trim_end_matches(']').to_owned(),
                port,
            ))
        };
        match kind {
            "soft" => {
                let name = rest_or("the name is missing")?;
                if name.len() > SOFT_NAME_MAX {
                    return Err(bad("the name is longer than 64 bytes"));
                }
                if !name.bytes().all(|b| b.is_ascii_graphic()) {
                    return Err(bad(
                        "the name has characters other than printable ASCII without blanks",
                    ));
                }
                Ok(Self::Soft(name.to_owned()))
            }
            "ntb" => Ok(Self::Ntb(rest_or("the PCI address is missing")?.to_owned())),
            "emu" => Ok(Self::Emulated(rest_or("the socket path is missing")?.to_owned())),
            "rdma" => {
                let rest = rest_or("the host is missing")?;
                let (place, options) = rest.split_once(',').unwrap_or((rest, ""));
                host_port(place).map(|(h, p)| Self::Rdma(h, p, options.to_owned()))
            }
            "tcp" => host_port(rest_or("the host is missing")?).map(|(h, p)| Self::Tcp(h, p)),
            "auto" => match rest {
                None => Ok(Self::Auto(None)),
                Some(_) => host_port(rest_or("the host is missing")?).map(|hp| Self::Auto(Some(hp))),
            },
            "" => Err(bad("it is empty")),
            _ => Err(bad("the transport is unknown")),
        }
    }
}

/// Longest name of a soft link in bytes: abstract socket names have 107.
pub const SOFT_NAME_MAX: usize = 64;

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = |h: &str| {
            if h.contains(':') {
                format!("[{h}]")
            } else {
                h.to_owned()
            }
        };
        match self {
            Self::Soft(name) => write!(f, "soft:{name}"),
            Self::Ntb(bdf) => write!(f, "ntb:{bdf}"),
            Self::Emulated(path) => write!(f, "emu:{path}"),
            Self::Rdma(h, p, options) if options.is_empty() => write!(f, "rdma:{}:{p}", host(h)),
            Self::Rdma(h, p, options) => write!(f, "rdma:{}:{p},{options}", host(h)),
            Self::Tcp(h, p) => write!(f, "tcp:{}:{p}", host(h)),
            Self::Auto(None) => f.write_str("auto"),
            Self::Auto(Some((h, p))) => write!(f, "auto:{}:{p}", host(h)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_addresses_print_as_they_were() {
        for text in [
            "soft:demo",
            "ntb:0000:81:00.0",
            "emu:/run/x.sock",
            "emu:@name",
            "rdma:10.0.0.1:7471",
            "rdma:[fd00::1]:7471,device=mlx5_0,gid=3",
            "tcp:[::1]:9000",
            "tcp:localhost:1",
            "auto",
            "auto:h:65535",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_addresses_say_why() {
        for text in [
            "",
            "soft",
            "soft:",
            "soft:a b",
            "ntb:",
            "emu:",
            "tcp:h",
            "tcp::1",
            "tcp:h:0",
            "tcp:h:65536",
            "x:y",
            "auto:",
            "auto:127.0.0.1:4711:5",
            "tcp:::1:9000",
            "rdma:fd00::1:7471",
        ] {
            let e = text.parse::<Address>().unwrap_err().to_string();
            assert!(e.contains("soft:NAME"), "{e}");
        }
        assert!(format!("soft:{}", "x".repeat(65)).parse::<Address>().is_err());
    }
}
