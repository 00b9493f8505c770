//! The driver's conformance suites, run over the socket on every emulated family.

use std::{
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ntb::{
    conformance::{FUNCTION_CASES, FunctionFixture, PORT_CASES, PortFixture, Ports},
    hw::{self, NtbPort},
    pci::{
        Bar, PciFunction,
        vfio_user::{Timeouts, VfioUser, socket::Socket},
    },
};
use ntb_emu::{
    EmuConfig, Emulator,
    model::{IrqKind, SideId, family},
    server::Endpoint,
};

static NEXT: AtomicU64 = AtomicU64::new(0);

struct Emulated {
    emulator: Emulator,
    names: [String; 2],
}

impl Emulated {
    fn start(name: &str) -> Self {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("ntb-emu-test-{}-{n}-{side}", std::process::id()));
        let [a, b] = names.clone().map(Endpoint::Abstract);
        let config = EmuConfig::new(family(name).unwrap(), a, b);
        Self {
            emulator: Emulator::start(config).unwrap(),
            names: names.map(|n| format!("@{n}")),
        }
    }

    fn function(&self, side: usize) -> Arc<dyn PciFunction> {
        let path = PathBuf::from(&self.names[side]);
        VfioUser::open(&path, Timeouts::default()).unwrap()
    }

    fn port(&self, side: usize) -> Arc<dyn NtbPort> {
        hw::open(&self.function(side)).unwrap()
    }

    fn no_faults(&self) {
        let report = self.emulator.control().report();
        for server in [report.server_a, report.server_b] {
            assert_eq!(server.faults, 0, "{server:?}");
        }
    }
}

impl PortFixture for Emulated {
    fn open(&self) -> Ports {
        Ports {
            a: self.port(0),
            b: self.port(1),
        }
    }

    fn reopen(&self, a: bool) -> Arc<dyn NtbPort> {
        self.port(usize::from(!a))
    }
}

impl FunctionFixture for Emulated {
    fn open(&self) -> Arc<dyn PciFunction> {
        self.function(0)
    }

    fn scratch(&self) -> (Bar, u64) {
        (Bar::B0, hw::regs::intel_gen4::IM_SPAD.offset().into())
    }

    fn raise(&self, _function: &Arc<dyn PciFunction>, vector: u16) -> bool {
        let control = self.emulator.control();
        control
            .pair()
            .port(SideId::A)
            .trigger(IrqKind::Msix, vector.into());
        true
    }
}

fn ports(name: &str) {
    for (case_name, case) in PORT_CASES {
        eprintln!("{name}: {case_name}");
        let emulated = Emulated::start(name);
        case(&emulated);
        emulated.no_faults();
    }
}

#[test]
fn function_suite() {
    for (name, case) in FUNCTION_CASES {
        eprintln!("{name}");
        let emulated = Emulated::start("intel-spr");
        case(&emulated);
        emulated.no_faults();
    }
}

#[test]
fn intel_spr() {
    ports("intel-spr");
}

#[test]
fn intel_gnr() {
    ports("intel-gnr");
}

#[test]
fn intel_icx() {
    ports("intel-icx");
}

#[test]
fn intel_skx() {
    ports("intel-skx");
}

#[test]
fn amd() {
    ports("amd");
}

#[test]
fn epf() {
    ports("epf");
}

#[test]
fn socket_pairs_will_do() {
    let (a, served_a) = UnixStream::pair().unwrap();
    let (b, served_b) = UnixStream::pair().unwrap();
    let [served_a, served_b] = [served_a, served_b].map(|s| Endpoint::Connected(Arc::new(s.into())));
    let config = EmuConfig::new(family("intel-spr").unwrap(), served_a, served_b);
    let emulator = Emulator::start(config).unwrap();
    let [a, b] = [a, b].map(|stream| {
        let socket = Socket::new(stream).unwrap();
        let function: Arc<dyn PciFunction> =
            VfioUser::from_socket("pair", socket, Timeouts::default()).unwrap();
        hw::open(&function).unwrap()
    });
    a.enable_link().unwrap();
    b.enable_link().unwrap();
    assert!(a.link().unwrap().is_up() && b.link().unwrap().is_up());
    drop((a, b));
    drop(emulator);
}
