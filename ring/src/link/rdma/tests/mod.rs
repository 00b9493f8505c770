//! Links over devices of a model, and the account of a queue.

mod accounts;
mod hostile;
mod trouble;

use std::{sync::Arc, time::Duration};

use super::{
    RdmaLink, RdmaOptions,
    model::{Behaviour, Model},
};
use crate::link::{
    Link,
    auth::{Purpose, Secret},
    conformance::Rig,
    meet::{Place, tests::free_port},
};

/// Two ends over devices 1 and 2 of a model, met at a port of the loopback.
pub(super) struct Ends {
    pub(super) model: Model,
    pub(super) port: u16,
    pub(super) options: RdmaOptions,
    pub(super) near: RdmaLink,
    pub(super) far: Option<RdmaLink>,
}

pub(super) fn options() -> RdmaOptions {
    RdmaOptions {
        window_bytes: 1 << 16,
        mirror_bytes: 1 << 15,
        stall: Duration::from_millis(200),
        ..RdmaOptions::default()
    }
}

impl Ends {
    pub(super) fn new(behaviour: Behaviour, options: &RdmaOptions) -> Self {
        let model = Model::new(behaviour);
        let port = free_port();
        Self {
            near: end(&model, 1, port, options),
            far: Some(end(&model, 2, port, options)),
            model,
            port,
            options: options.clone(),
        }
    }
}

pub(super) fn place(port: u16, secret: &Secret) -> Place {
    Place::new(Purpose::Rdma, "127.0.0.1", port, secret, None).unwrap()
}

/// One end over a device of a model.
pub(super) fn end(model: &Model, device: u32, port: u16, options: &RdmaOptions) -> RdmaLink {
    let model = model.clone();
    RdmaLink::over(
        place(port, &Secret::none()),
        options,
        Box::new(move || model.open(device)),
    )
    .unwrap()
}

impl Rig for Ends {
    fn near(&mut self) -> &mut dyn Link {
        &mut self.near
    }
    fn far(&mut self) -> Option<&mut dyn Link> {
        self.far.as_mut().map(|far| far as &mut dyn Link)
    }
    fn lose(&mut self) {
        self.far = None;
    }
    fn restore(&mut self) {
        self.far = Some(end(&self.model, 2, self.port, &self.options));
    }
}

/// Suites of rules, each over another kind of device.
macro_rules! suite {
    ($name:ident, $behaviour:expr, $change:expr) => {
        mod $name {
            use super::super::super::{options::Manager, verbs::Fabric};
            use super::*;
            fn rig() -> Ends {
                let mut options = options();
                let change: fn(&mut RdmaOptions) = $change;
                change(&mut options);
                let _ = (Manager::Auto, Fabric::Roce); // named by some
                Ends::new($behaviour, &options)
            }
            crate::link_conformance!(rig());
        }
    };
}

mod conformance {
    use super::*;

    suite!(roce, Behaviour::default(), |_| {});
    suite!(
        without_manager,
        Behaviour {
            has_manager: false,
            ..Behaviour::default()
        },
        |_| {}
    );
    suite!(
        iwarp,
        Behaviour {
            fabric: Fabric::Iwarp,
            inline: 80,
            ..Behaviour::default()
        },
        |_| {}
    );
    suite!(
        torn,
        Behaviour {
            torn: 300_000,
            ..Behaviour::default()
        },
        |_| {}
    );
    suite!(
        delayed,
        Behaviour {
            torn: 300_000,
            delayed: 700_000,
            ..Behaviour::default()
        },
        |_| {}
    );
    suite!(
        strict_delayed,
        Behaviour {
            delayed: 700_000,
            ..Behaviour::default()
        },
        |o| o.strict = true
    );
    suite!(strict, Behaviour::default(), |o| o.strict = true);
    suite!(
        strict_iwarp,
        Behaviour {
            fabric: Fabric::Iwarp,
            inline: 80,
            ..Behaviour::default()
        },
        |o| o.strict = true
    );
    suite!(
        shallow,
        Behaviour {
            depth: 16,
            ..Behaviour::default()
        },
        |o| o.manager = Manager::Never
    );
}

pub(super) fn shared(ends: Ends) -> (Arc<Model>, RdmaLink, RdmaLink) {
    let far = ends.far.expect("made with both ends");
    (Arc::new(ends.model), ends.near, far)
}
