//! Peers that are killed, or that never come, while starts are on streams: the others say who is
//! missing, their streams go on, and they gather again without it.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::tcp::Hub;
use peerlane_conformance::{CudaDriver, Outcome};

use crate::Fault;
use crate::cast::{finish, patience, ranks, says};
use crate::cuda_support::data::{check, unexpected};
use crate::survivor::Phase;

const RANKS: usize = 3;
const VICTIM: usize = 1;
/// A survivor that has said that it waits is waiting by then.
const SETTLING: Duration = Duration::from_millis(30);
/// The timeout of a start to which a peer never comes.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);
const LONG_TIMEOUT: Duration = Duration::from_secs(20);
/// How much later than it must a stream may go on.
const GRACE: Duration = Duration::from_secs(2);

pub(crate) fn faults() -> Vec<Fault> {
    let killed = Phase::ALL.map(|phase| {
        Fault::new(format!("peer_killed::{phase}"), move |driver| lost(driver, phase, true))
    });
    let silent = [Phase::BeforeItStarts, Phase::HostWaits].map(|phase| {
        Fault::new(format!("peer_silent::{phase}"), move |driver| lost(driver, phase, false))
    });
    killed.into_iter().chain(silent).collect()
}

/// The victim is killed once all others wait for it; or lives, and does nothing.
fn lost(driver: CudaDriver, phase: Phase, killed: bool) -> Outcome {
    let timeout = if killed { LONG_TIMEOUT } else { SHORT_TIMEOUT };
    let (_hub, mut children) = ranks(driver, "survive", RANKS, |rank, player| {
        let player = player.value("PHASE", phase).value("TIMEOUT_MILLIS", timeout.as_millis());
        let player = player.value("VICTIM", rank == VICTIM);
        match rank == VICTIM && phase == Phase::WhileItPushes {
            // Its copies are still to run when it is killed.
            true => player.variable("PEERLANE_SIM_COPY_DELAY_US", "30000"),
            false => player,
        }
    })?;
    children[VICTIM].expect("at its place", patience())?;
    let survivors = || (0..RANKS).filter(|rank| *rank != VICTIM);
    for rank in survivors() {
        children[rank].expect("waits", patience())?;
    }
    std::thread::sleep(SETTLING);
    let begun = Instant::now();
    if killed {
        children[VICTIM].kill()?;
    }
    for rank in survivors() {
        let text = children[rank].hear(patience())?;
        let (took, limit) = (begun.elapsed(), if killed { GRACE } else { timeout + GRACE });
        check(took < limit, || format!("rank {rank} took {took:?}, wanted {limit:?}: {text}"))?;
        judge(rank, &text, killed)?;
    }
    if !killed {
        children[VICTIM].tell("go on")?;
        let text = children[VICTIM].hear(patience())?;
        says("the silent rank", &text, "fell in start: timeout, rank 1: ", &["within 1s"])?;
        children[VICTIM].finish(patience())?;
    }
    let hub = Hub::bind("127.0.0.1:0", RANKS - 1).map_err(unexpected)?;
    for (place, rank) in survivors().enumerate() {
        children[rank].expect("alive", patience())?;
        children[rank].tell(format_args!("{} {place}", hub.address()))?;
    }
    for rank in survivors() {
        children[rank].expect("gathered again", patience())?;
    }
    drop(children.remove(VICTIM));
    finish(children)
}

/// Names the victim, and what was waited for.
fn judge(rank: usize, text: &str, killed: bool) -> Outcome {
    let who = format!("rank {rank}");
    if killed {
        return says(&who, text, "fell in start: peer lost, rank 1: ", &["rank 1 is lost"]);
    }
    // Whoever was first has written the record.
    let holds = ["start 1", "within 1s", "waited for \"ready from 1\" from rank 1"];
    says(&who, text, "fell in start: timeout, rank 1: ", &holds)
}
