//! Where a campaign takes place: two addresses; for emulated bridges the emulator, whose family the seed chooses; for TCP and
//! RDMA a secret, and a relay that can be cut.

use std::time::Duration;

use ntb_emu::{
    EmuConfig, Emulator,
    model::{Action, FAMILIES, SideId, disturb::Severity},
    server::Endpoint,
};
use ntb_ring::link::{
    Link,
    auth::{Purpose, Secret},
    select,
};
use rustix::{io::Errno, net::SocketType};

use crate::{Rng, relay::Relay};

/// Bytes of an emulated window.
const WINDOW_BYTES: u64 = 1 << 20;

/// Two ends that can be opened, in this process or others.
#[derive(Debug)]
pub(crate) struct Venue {
    addresses: [String; 2],
    bridges: Option<(Emulator, &'static str)>,
    network: Option<Network>,
}

/// What there is of a venue whose ends meet at a port.
#[derive(Debug)]
struct Network {
    purpose: Purpose,
    port: u16,
    secret: String,
    relay: Option<Relay>,
}

/// A port that is free now, below those that callers get theirs from.
fn free_port(rng: &mut Rng) -> Result<u16, String> {
    (0..100)
        .map(|_| 20_000 + rng.below(12_000) as u16)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .ok_or_else(|| "no free port between 20000 and 31999".to_owned())
}

/// Options of a link in this process or a child of it: with the secret of the environment, where there is one.
pub(crate) fn options() -> Result<select::LinkOptions, String> {
    Ok(select::LinkOptions {
        secret: Secret::from_env().map_err(|e| e.to_string())?,
        ..select::LinkOptions::default()
    })
}

impl Venue {
    /// A place of its own over TCP or RDMA whose second end meets the first through a relay.
    pub(crate) fn relayed(link: &str, rng: &mut Rng) -> Result<Self, String> {
        let mut venue = Self::new(link, rng)?;
        if let Some(network) = &mut venue.network {
            let relay = Relay::start(network.port)?;
            venue.addresses[1] = format!("{link}:127.0.0.1:{}", relay.port());
            network.relay = Some(relay);
        }
        Ok(venue)
    }

    /// A place of its own on a transport: `soft`, `emu`, `tcp` or `rdma`.
    pub(crate) fn new(link: &str, rng: &mut Rng) -> Result<Self, String> {
        let name = format!("campaign-{}-{:x}", std::process::id(), rng.next());
        let purpose = match link {
            "tcp" => Some(Purpose::Tcp),
            "rdma" => Some(Purpose::Rdma),
            _ => None,
        };
        if let Some(purpose) = purpose {
            let port = free_port(rng)?;
            let address = format!("{link}:127.0.0.1:{port}");
            return Ok(Self {
                addresses: [address.clone(), address],
                bridges: None,
                network: Some(Network {
                    purpose,
                    port,
                    secret: format!("{name}-{:x}", rng.next()),
                    relay: None,
                }),
            });
        }
        if link != "emu" {
            let address = format!("{link}:{name}");
            return Ok(Self {
                addresses: [address.clone(), address],
                bridges: None,
                network: None,
            });
        }
        let family = FAMILIES[rng.below(FAMILIES.len() as u64) as usize];
        let [a, b] = ["a", "b"].map(|side| format!("{name}-{side}"));
        let mut config = EmuConfig::new(
            family,
            Endpoint::Abstract(a.clone()),
            Endpoint::Abstract(b.clone()),
        );
        config.pair.window_bytes = WINDOW_BYTES;
        let emulator = Emulator::start(config).map_err(|e| e.to_string())?;
        Ok(Self {
            addresses: [a, b].map(|name| format!("emu:@{name}")),
            bridges: Some((emulator, family.name())),
            network: None,
        })
    }

    /// Address of an end.
    pub(crate) fn address(&self, side: usize) -> &str {
        &self.addresses[side]
    }

    /// Where the ends meet, and for what, where they meet at a port.
    pub(crate) fn meeting(&self) -> Option<(u16, Purpose)> {
        self.network
            .as_ref()
            .map(|network| (network.port, network.purpose))
    }

    /// What both ends know, where they meet at a port.
    pub(crate) fn secret(&self) -> Option<&str> {
        self.network.as_ref().map(|network| network.secret.as_str())
    }

    /// Options of an end in this process.
    pub(crate) fn options(&self, window_bytes: u64) -> Result<select::LinkOptions, String> {
        Ok(select::LinkOptions {
            window_bytes,
            secret: match self.secret() {
                Some(secret) => Secret::new(secret.as_bytes()).map_err(|e| e.to_string())?,
                None => Secret::none(),
            },
            ..select::LinkOptions::default()
        })
    }

    /// Cuts every connection over the relay.
    pub(crate) fn cut(&self) {
        if let Some(Network {
            relay: Some(relay), ..
        }) = &self.network
        {
            relay.cut();
        }
    }

    /// Abstract name of the socket behind an end.
    pub(crate) fn socket(&self, side: usize) -> String {
        let address = self.address(side);
        match (address.strip_prefix("emu:@"), address.strip_prefix("soft:")) {
            (Some(name), _) => name.to_owned(),
            (None, name) => format!("ntb-soft:{}", name.unwrap_or_default()),
        }
    }

    /// Kind of that socket.
    pub(crate) fn socket_kind(&self) -> SocketType {
        match self.bridges {
            Some(_) => SocketType::STREAM,
            None => SocketType::SEQPACKET,
        }
    }

    /// Family of the bridges, where there are any.
    pub(crate) fn family(&self) -> Option<&'static str> {
        self.bridges.as_ref().map(|(_, family)| *family)
    }

    /// Opens an end in this process.
    pub(crate) fn open(&self, side: usize, window_bytes: u64) -> Result<Box<dyn Link>, String> {
        let address = self.address(side).parse().map_err(|e| format!("{e}"))?;
        Ok(select::open(&address, &self.options(window_bytes)?)
            .map_err(|e| e.to_string())?
            .link)
    }

    /// Does something to the bridges.
    pub(crate) fn act(&self, action: Action) {
        if let Some((emulator, _)) = &self.bridges {
            emulator.control().act(action);
        }
    }

    /// Pulls the cable and plugs it in.
    pub(crate) fn flap(&self, times: u32) {
        for _ in 0..times {
            self.act(Action::LinkDown);
            self.act(Action::LinkUp);
        }
    }

    /// One of the things that can happen to a bridge and must lose nothing but the life of the link, by the name of what
    /// was done.
    pub(crate) fn trouble(&self, rng: &mut Rng) -> &'static str {
        let side = SideId::BOTH[rng.below(2) as usize];
        let pause = |rng: &mut Rng, most: u64| std::thread::sleep(Duration::from_micros(rng.below(most)));
        match rng.below(9) {
            0 => {
                self.act(Action::LinkDown);
                pause(rng, 20_000);
                self.act(Action::LinkUp);
                "cable"
            }
            1 => {
                self.act(Action::Remove(side));
                pause(rng, 20_000);
                self.act(Action::Return(side));
                "removal"
            }
            2 => {
                self.act(Action::Dead {
                    from: side,
                    dead: true,
                });
                self.flap(1);
                pause(rng, 20_000);
                self.act(Action::Dead {
                    from: side,
                    dead: false,
                });
                self.flap(1); // what was lost while it was dead is lost with the life
                "dead-direction"
            }
            3 => {
                let time = Duration::from_micros(rng.below(500));
                self.act(Action::Delay { from: side, time });
                pause(rng, 20_000);
                self.act(Action::Delay {
                    from: side,
                    time: Duration::ZERO,
                });
                "delay"
            }
            4 => {
                self.act(Action::HoldLines {
                    from: side,
                    bytes: 8 * (1 + rng.below(7) as usize),
                    time: Duration::from_micros(rng.below(300)),
                    every: 1 + rng.below(20),
                });
                pause(rng, 20_000);
                self.act(Action::HoldLines {
                    from: side,
                    bytes: 8,
                    time: Duration::ZERO,
                    every: 0,
                });
                "held-lines"
            }
            5 => {
                let count = 1 + rng.below(20);
                self.act(match rng.below(3) {
                    0 => Action::LoseRegisters { from: side, count },
                    1 => Action::BlankRegisters { from: side, count },
                    _ => Action::LoseDoorbells { from: side, count },
                });
                self.flap(1);
                "handshake"
            }
            6 => {
                self.act(match rng.below(2) {
                    0 => Action::Speed(1 + rng.below(5) as u8),
                    _ => Action::Width(1 << rng.below(5)),
                });
                "rate"
            }
            7 => {
                let severities = [Severity::Correctable, Severity::NonFatal, Severity::Fatal];
                let severity = severities[rng.below(3) as usize];
                self.act(Action::Error { side, severity });
                "error"
            }
            _ => {
                self.act(Action::RefuseMap {
                    side,
                    nth: 1,
                    errno: Errno::NOMEM,
                });
                self.flap(1);
                "refused-mapping"
            }
        }
    }

    /// Writes of window memory that each side has made, and loads that have crossed the link.
    pub(crate) fn counts(&self) -> Option<([u64; 2], u64)> {
        let (emulator, _) = self.bridges.as_ref()?;
        let pair = emulator.control().report().pair;
        let ways = [pair.a_to_b, pair.b_to_a];
        let reads = ways.iter().map(|way| way.window_reads + way.register_reads).sum();
        Some((ways.map(|way| way.window_writes), reads))
    }

    /// Stores that hit memory that is not mapped since the window they came through had been programmed across the wire
    /// and that was lost or altered: the IOMMU is there for them.
    pub(crate) fn misled(&self) -> u64 {
        let Some((emulator, _)) = &self.bridges else {
            return 0;
        };
        let pair = emulator.control().report().pair;
        pair.a_to_b.fault_misled + pair.b_to_a.fault_misled
    }

    /// What must never happen on a bridge: stores that hit memory that is not mapped, whatever was done to the bridge, but
    /// for those of [`Self::misled`].
    pub(crate) fn violations(&self) -> Vec<String> {
        let Some((emulator, family)) = &self.bridges else {
            return Vec::new();
        };
        let pair = emulator.control().report().pair;
        let ways = [("a", pair.a_to_b), ("b", pair.b_to_a)];
        ways.iter()
            .map(|(name, way)| (name, way.fault_unmapped + way.fault_forbidden))
            .filter(|(_, faults)| *faults > 0)
            .map(|(name, faults)| {
                format!("{family}: {faults} stores by side {name} hit memory that is not mapped")
            })
            .collect()
    }
}
