//! Tests fused starts on the model of their kernel: every byte of several collectives, releases,
//! and what is refused. `mutants` shows that these tests find faults of a kernel.

mod mutants;
mod refused;
mod release;
mod world;

use std::time::{Duration, Instant};

use peerlane_cuda::Fabric;
use peerlane_hal::{CopyEngine as _, DType, Operator, Reduction, Ticket};
use peerlane_simulated_driver::in_own_process;

use self::world::{COLLECTIVES, Case, Collective, Member, PATIENCE, fabrics, world};
use crate::backend::{Compute, Graph, Mode};
use crate::support::driver;

/// The lengths of inputs, and numbers of blocks that take turns.
const LENGTHS: [u64; 6] = [1, 7, 8, 1000, 4096, 70_001];
const BLOCKS: [u32; 3] = [1, 3, 16];
const ROUNDS: usize = 6;

/// How a rank makes the starts of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    Eager,
    /// On a stream of the caller.
    OnStream,
    /// A graph of two starts.
    Replay,
}

impl Round {
    fn new(round: usize) -> Self {
        [Self::Eager, Self::Replay, Self::OnStream, Self::Replay][round % 4]
    }
}

/// A rank that makes its rounds one after the other, as fast as it can.
struct Runner {
    member: Member,
    compute: Compute,
    graph: Graph,
    /// The rounds that have begun, and the ticket of the last eager start.
    begun: usize,
    ticket: Option<Ticket>,
}

impl Runner {
    fn new(mut member: Member, device: usize) -> Self {
        let compute = Compute::new(device);
        compute.begin_capture(Mode::Relaxed);
        for _ in 0..2 {
            on_stream(&mut member, &compute);
        }
        let graph = compute.end_capture();
        Self { member, compute, graph, begun: 0, ticket: None }
    }

    /// Goes on if the last round has ended, whose output it checks. Returns whether all have.
    fn poll(&mut self, expected: &[Vec<u8>]) -> bool {
        let is_done = match self.ticket {
            Some(ticket) => self.member.is_done(ticket),
            None => self.compute.is_idle(),
        };
        if !is_done {
            return false;
        }

        let case = self.member.case;
        if let Some(round) = self.begun.checked_sub(1) {
            let wrong = self.member.wrong_byte(&expected[round]);
            assert_eq!(wrong, None, "{case:?}, round {round}: a wrong byte");
        }
        if self.begun == ROUNDS {
            return true;
        }
        self.member.prepare(self.begun);
        self.ticket = match Round::new(self.begun) {
            Round::Eager => Some(self.member.start()),
            Round::OnStream => Some(on_stream(&mut self.member, &self.compute)),
            Round::Replay => {
                self.graph.launch();
                None
            }
        };
        self.begun += 1;
        false
    }
}

/// Makes a start in the order of a stream, or records it if the stream captures.
fn on_stream(member: &mut Member, compute: &Compute) -> Ticket {
    member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
    let ticket = member.start();
    member.engine.streams().unwrap().join(&compute.handle()).unwrap();
    ticket
}

/// Runs all rounds of a case.
fn run(fabrics: &[Fabric], case: Case) {
    let members = world(&fabrics[..case.ranks], case);
    let ranks = members.into_iter().enumerate();
    let mut runners: Vec<_> = ranks.map(|(rank, member)| Runner::new(member, rank)).collect();

    let expected: Vec<Vec<u8>> = (0..ROUNDS).map(|round| case.expected(round)).collect();
    let start = Instant::now();
    loop {
        let polled: Vec<bool> = runners.iter_mut().map(|runner| runner.poll(&expected)).collect();
        if !polled.contains(&false) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{case:?}: {polled:?} have ended");
        std::thread::yield_now();
    }
}

fn every_byte_is_right(ranks: usize) {
    let (driver, _turn) = driver();
    let fabrics = fabrics(ranks);
    let mut seed = 0;
    for collective in COLLECTIVES {
        for (index, bytes) in LENGTHS.into_iter().enumerate() {
            let (first, all) = if ranks == 2 { (0, 3) } else { (index, 1) };
            for blocks in BLOCKS.into_iter().cycle().skip(first).take(all) {
                seed += 1;
                driver.set("SEED", &seed.to_string());
                driver.set("JITTER_US", if seed % 3 == 0 { "200" } else { "0" });
                run(&fabrics, Case::new(collective, ranks, bytes, blocks));
            }
        }
    }
    driver.set("JITTER_US", "0");
    driver.set("SEED", "1");
}

#[test]
fn two_ranks_get_every_byte() {
    every_byte_is_right(2);
}

#[test]
fn three_ranks_get_every_byte() {
    every_byte_is_right(3);
}

#[test]
fn four_ranks_get_every_byte() {
    every_byte_is_right(4);
}

#[test]
fn eight_ranks_get_every_byte() {
    // A process keeps its number of devices.
    in_own_process(|| {
        peerlane_simulated_driver::install().set("DEVICES", "8");
        every_byte_is_right(8);
    });
}

/// The kernel of each type, with what it needs for signed numbers, minima and averages.
#[test]
fn every_reduction_is_right() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(3);
    let all = DType::ALL.into_iter().flat_map(|dtype| Operator::ALL.map(|it| (it, dtype)));
    let there = |pair: &(Operator, DType)| Reduction::new(pair.0, pair.1).is_ok();
    for (index, (operator, dtype)) in all.filter(there).enumerate() {
        let kinds = [Collective::ReduceTagged, Collective::ReduceInParts, Collective::ReduceDirect];
        let collective = kinds[index % kinds.len()];
        run(&fabrics, Case { operator, dtype, ..Case::new(collective, 3, 1000, 2) });
    }
}

/// Numbers of starts are not limited: tags begin again from 0, and flags go on from any base.
#[test]
fn numbers_of_starts_wrap_around_in_tags() {
    let (driver, _turn) = driver();
    let fabrics = fabrics(2);
    for (starts, base) in [((1_u64 << 32) - 6, 0), ((1 << 16) - 5, 77), (0, (1 << 32) - 3)] {
        driver.set("KERNEL_STARTS", &starts.to_string());
        // No peer has begun the last of the starts that are only counted.
        let waits_for_last = |it: &Collective| starts > 0 && *it == Collective::BroadcastTagged;
        for collective in COLLECTIVES.into_iter().filter(|it| !waits_for_last(it)) {
            run(&fabrics, Case { base, ..Case::new(collective, 2, 1000, 2) });
        }
    }
    driver.set("KERNEL_STARTS", "0");
}

/// The model is fast enough for tests with much data.
#[test]
fn a_mebibyte_takes_milliseconds() {
    let (_driver, _turn) = driver();
    let fabrics = fabrics(4);
    for collective in [Collective::GatherTagged, Collective::GatherDirect] {
        let case = Case::new(collective, 4, 1 << 18, 16);
        let mut members = world(&fabrics, case);
        members.iter().for_each(|member| member.prepare(0));
        let expected = case.expected(0);

        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let since = Instant::now();
            let tickets: Vec<Ticket> = members.iter_mut().map(Member::start).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                assert!(member.ends_within(ticket, PATIENCE));
            }
            fastest = fastest.min(since.elapsed());
        }
        let wrong: Vec<_> = members.iter().map(|member| member.wrong_byte(&expected)).collect();
        assert_eq!(wrong, [None; 4]);
        println!("{collective:?}: {fastest:?}");
        assert!(fastest < Duration::from_millis(500), "{collective:?}: {fastest:?}");
    }
}
