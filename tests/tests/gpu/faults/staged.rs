//! Gathers between devices that cannot reach each other: ranks stage through host memory and report
//! it, unless they are strict.

use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::group::Group;
use peerlane_hal::{Deadline, Rank};
use peerlane_tests::processes::Parent;
use peerlane_tests::{GpuDriver, Outcome};

use super::Fault;
use super::processes::{Player, finish, ranks, says, words};
use crate::driver::VISIBLE;
use crate::support::data::unexpected;
use crate::support::test_rank::{Form, TestRank};
use crate::vendor::{Context, Fabric, Options, options};

const TIMEOUT: Duration = Duration::from_secs(20);
const BLOCK_BYTES: usize = 5001;

pub(crate) fn faults() -> Vec<Fault> {
    let apart = |_, player: Player| player.variable("PEERLANE_SIM_P2P", "off");
    let mut faults: Vec<Fault> = [2, 3]
        .into_iter()
        .map(|count| {
            Fault::simulated(format!("no_peer_access::{count}_ranks"), move |driver| {
                gathers(driver, count, apart)
            })
        })
        .collect();
    faults.push(Fault::simulated("no_peer_access::hidden_devices", move |driver| {
        gathers(driver, 2, |rank, player| apart(rank, player).variable(VISIBLE, rank.to_string()))
    }));
    // The third rank is alone, and for its sake the memory of the others is on the host.
    faults.push(Fault::simulated("no_peer_access::islands", |driver| {
        gathers(driver, 3, |_, player| player.variable("PEERLANE_SIM_P2P_ISLAND", "2"))
    }));
    faults.push(Fault::simulated("no_peer_access::strict", strict));
    faults
}

/// All ranks gather what they should, and report every peer.
fn gathers(driver: GpuDriver, count: usize, change: impl Fn(usize, Player) -> Player) -> Outcome {
    let (_hub, mut children) = ranks(driver, "staged", count, change)?;
    for _ in Form::ALL {
        for (rank, text) in words(&mut children)?.iter().enumerate() {
            let others = (0..count).filter(|peer| *peer != rank);
            let holds: Vec<_> = others
                .map(|peer| format!("copies to rank {peer} go through host memory"))
                .collect();
            let holds: Vec<_> = holds.iter().map(String::as_str).collect();
            says(&format!("rank {rank}"), text, "gathered: ", &holds)?;
            let own = format!("copies to rank {rank} ");
            if text.contains(&own) {
                return says(&format!("rank {rank}"), text, "nothing of its own memory", &[]);
            }
        }
    }
    finish(children)
}

/// Nobody can gather, and everybody says which two devices stand against it.
fn strict(driver: GpuDriver) -> Outcome {
    let (_hub, mut children) =
        ranks(driver, "strict", 2, |_, player| player.variable("PEERLANE_SIM_P2P", "off"))?;
    for (rank, text) in words(&mut children)?.iter().enumerate() {
        // By their UUIDs, because each process counts its devices by itself.
        let (own, other) = (format!("rank {rank} on GPU-"), format!("rank {} on GPU-", 1 - rank));
        let holds = [own.as_str(), &other, "peer access", "strict"];
        says(&format!("rank {rank}"), text, "unavailable: ", &holds)?;
    }
    finish(children)
}

/// A rank that gathers in every form, and says how.
pub(crate) fn gather(parent: &Parent) -> Outcome {
    let mut test_rank = TestRank::open(parent)?;
    for form in Form::ALL {
        let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES);
        let mut gather = form.of(builder).prepare().map_err(unexpected)?;
        (0..4).try_for_each(|_| test_rank.gather_once(&mut gather))?;
        parent.print_line(format_args!("gathered: {}", gather.report()));
    }
    test_rank.group.close().map_err(unexpected)
}

/// A rank that wants the best way or none.
pub(crate) fn refuse(parent: &Parent) -> Outcome {
    GpuDriver::load::<Context>();
    let (me, ranks): (usize, usize) = (parent.value("RANK")?, parent.value("RANKS")?);
    let environment = Environment::at_hub(&parent.value::<String>("HUBS")?, Rank::at(me), ranks);
    let bootstrap =
        TcpBootstrap::join(&environment, Deadline::after(TIMEOUT)).map_err(unexpected)?;
    let options = Options { strict: true, ..options(me as u32) };
    let fabric = Fabric::open_with(Rank::at(me), ranks, options)?;
    match Group::open(bootstrap, fabric) {
        Ok(_) => parent.print_line("opened"),
        Err(error) => parent.print_line(format_args!("{}: {error}", error.kind())),
    }
    Ok(())
}
