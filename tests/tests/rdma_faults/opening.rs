//! Opens devices and connects peers that do not exist, or do not exist yet.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, ErrorKind, Fabric as _, PeerMemory, Rank, Role};
use peerlane_rdma::{DeviceChoice, Fabric, Options};
use peerlane_tests::{Failure, Outcome};

use crate::links::{first_node, set_link, tc};
use crate::pair::{drive, ensure, late, options, pair, put, region, wanted};

pub(crate) fn no_device() -> Outcome {
    let device = DeviceChoice::Name("peerlane-none".into());
    let opened = Fabric::open_with(Rank(0), 1, Options { device, ..Options::default() });
    let text = wanted(ErrorKind::Unavailable, opened.map(drop))?;
    ensure(!text.is_empty(), "no words")
}

pub(crate) fn wrong_place() -> Outcome {
    let open = |change: fn(&mut Options)| {
        let mut options = options(0);
        change(&mut options);
        wanted(ErrorKind::InvalidArgument, Fabric::open_with(Rank(0), 1, options).map(drop))
    };
    let text = open(|options| options.gid_index = Some(200))?;
    ensure(text.starts_with("gid_index is 200"), text)?;
    let text = open(|options| options.port = Some(9))?;
    ensure(text.starts_with("port is 9"), text)?;
    let text = open(|options| options.retries = 9)?;
    ensure(text.starts_with("retries is 9"), text)
}

/// Takes the port of the first namespace down.
pub(crate) fn port_down() -> Outcome {
    let node = first_node().ok_or_else(|| Failure::new("there is no namespace"))?;
    set_link(&node, "down")?;
    std::thread::sleep(Duration::from_millis(200));
    let opened = Fabric::open_with(Rank(0), 1, options(0)).map(drop);
    set_link(&node, "up")?;
    let text = wanted(ErrorKind::Unavailable, opened)?;
    ensure(text.contains("no active port") || text.contains("no address"), text)?;
    let deadline = late();
    while Fabric::open_with(Rank(0), 1, options(0)).is_err() {
        ensure(!deadline.has_passed(), "the port does not come back")?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A peer that takes a second to answer: the first op is taken at once all the same.
pub(crate) fn slow_peer() -> Outcome {
    const DELAY: &str = "1s";
    const AT_ONCE: Duration = Duration::from_millis(500);
    let fabrics = pair(|_| {})?;
    let (_local, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    tc(&["qdisc", "add", "dev", "lo", "root", "netem", "delay", DELAY])?;
    let begun = Instant::now();
    // SAFETY: the regions live until the put is complete, and nobody touches them.
    let ticket = unsafe { engine.submit(&[put(&remote, &source, 4096)]) };
    let submitted = begun.elapsed();
    let looked = engine.completed();
    let took = begun.elapsed();
    let done = ticket.map_err(Failure::from).and_then(|ticket| Ok(drive(&mut engine, ticket)?));
    let opened = begun.elapsed();
    drop(engine);
    tc(&["qdisc", "del", "dev", "lo", "root"])?;
    done?;
    looked?;
    ensure(took < AT_ONCE, format!("submit took {submitted:?}, and with a look {took:?}"))?;
    ensure(opened > AT_ONCE, format!("the peer answered after {opened:?}: nothing was tried"))
}
