//! Wrapping a link's engines, so that counters and fault injectors run under whole channels on any transport.

use std::{fmt, sync::Arc, time::Duration};

use ntb_mem::region::View;

use super::{
    Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkStatus, Pump, Registers,
    engine::{Engine, Order},
};

/// Makes an engine out of an engine.
pub type EngineHook = Box<dyn Fn(Engine) -> Engine + Send>;

/// A link whose every engine goes through a hook; everything else is the link's own.
pub struct Wrapped<L> {
    link: L,
    order: Order,
    hook: EngineHook,
}

impl<L: Link> Wrapped<L> {
    /// Puts `hook` over `link`. `order` is what the engines that it makes keep in order.
    pub fn new(link: L, order: Order, hook: EngineHook) -> Self {
        Self { link, order, hook }
    }

    /// The link below.
    pub fn inner(&self) -> &L {
        &self.link
    }
}

impl<L: fmt::Debug> fmt::Debug for Wrapped<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wrapped").field(&self.link).finish()
    }
}

/// Hands a call on, all but the engines.
macro_rules! delegate {
    ($self:ident => $link:expr) => {
        fn facts(&$self) -> LinkFacts {
            $link.facts()
        }
        fn poll(&mut $self) -> Result<LinkStatus, LinkError> {
            $link.poll()
        }
        fn wait(&$self, timeout: Duration) {
            $link.wait(timeout);
        }
        fn registers(&$self) -> Registers {
            $link.registers()
        }
        fn write_registers(&mut $self, registers: &Registers) {
            $link.write_registers(registers);
        }
        fn inbound(&$self) -> View {
            $link.inbound()
        }
        fn exported(&$self) -> Option<View> {
            $link.exported()
        }
        fn ring(&mut $self, doorbell: u32) {
            $link.ring(doorbell);
        }
        fn doorbell(&$self, number: u32) -> Doorbell {
            $link.doorbell(number)
        }
        fn distinct_doorbells(&$self) -> u32 {
            $link.distinct_doorbells()
        }
        fn next_event(&mut $self) -> Option<LinkEvent> {
            $link.next_event()
        }
        fn pump(&$self) -> Option<Arc<dyn Pump>> {
            $link.pump()
        }
    };
}

impl<L: Link> Link for Wrapped<L> {
    delegate!(self => self.link);

    fn order(&self) -> Order {
        self.order
    }

    fn outbound(&self) -> Option<Engine> {
        self.link.outbound().map(&self.hook)
    }
}

impl<L: Link + ?Sized> Link for Box<L> {
    delegate!(self => (**self));

    fn order(&self) -> Order {
        (**self).order()
    }

    fn outbound(&self) -> Option<Engine> {
        (**self).outbound()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{
        combining::{Combining, CombiningOptions, StorePath},
        conformance::Rig,
        faults::{FaultOptions, Faults},
        pair::{PairControl, PairOptions, pair},
    };

    /// A pair under hooks, by way of trait objects.
    struct Hooked(Wrapped<Box<dyn Link>>, Wrapped<Box<dyn Link>>, PairControl);

    impl Hooked {
        fn new(hook: impl Fn(Order) -> (Order, EngineHook)) -> Self {
            let options = PairOptions {
                window_bytes: 1 << 16,
                ..PairOptions::default()
            };
            let (a, b) = pair(&options).unwrap();
            let control = a.control();
            let wrap = |link: Box<dyn Link>| {
                let (order, hook) = hook(link.order());
                Wrapped::new(link, order, hook)
            };
            Self(wrap(Box::new(a)), wrap(Box::new(b)), control)
        }
    }

    impl Rig for Hooked {
        fn near(&mut self) -> &mut dyn Link {
            &mut self.0
        }
        fn far(&mut self) -> Option<&mut dyn Link> {
            Some(&mut self.1)
        }
        fn lose(&mut self) {
            self.2.cut();
        }
        fn restore(&mut self) {
            self.2.restore().unwrap();
        }
    }

    mod combining {
        use super::*;

        fn rig() -> Hooked {
            let model = Combining::new(CombiningOptions {
                early_eviction: 100_000,
                ..CombiningOptions::new(StorePath::Combining8, 3)
            });
            Hooked::new(|inner| (model.order(inner), model.hook()))
        }
        crate::link_conformance!(rig());
    }

    mod faults {
        use super::*;

        fn rig() -> Hooked {
            let options = FaultOptions {
                seed: 4,
                keep_order: true,
                hold: 300_000,
                split: 300_000,
                ..FaultOptions::default()
            };
            Hooked::new(|inner| {
                let faults = Faults::new(options.clone());
                (faults.order(inner), faults.hook())
            })
        }
        crate::link_conformance!(rig());
    }
}
