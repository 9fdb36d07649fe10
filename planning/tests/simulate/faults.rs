//! What cannot be simulated says why.

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::cost::Links;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::{Algorithm, Cell, Flag, LaneId, Plan, Step};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, Options};
use peerlane_planning::topology::Topology;

fn refused(ranks: usize, layout: &Layout, options: &Options, change: impl Fn(&mut Plan)) -> String {
    let topology = Topology::flat(ranks).unwrap();
    let plan = |rank| {
        let mut plan = schedule::plan(Algorithm::Ring, &topology, rank, Shape::default())?;
        change(&mut plan);
        Ok(plan)
    };
    let links = Links::default();
    simulate::simulate(&topology, layout, &links, options, plan).unwrap_err().to_string()
}

fn steps(plan: &mut Plan) -> &mut Vec<Step> {
    &mut plan.lanes[0].steps
}

#[test]
fn plans_with_faults_are_refused_by_place() {
    let layout = Layout::new(Collective::AllGather, &[100; 3], 1).unwrap();
    let of_rank_1 = |change: fn(&mut Plan)| {
        refused(3, &layout, &Options::default(), |plan| {
            if plan.rank == Rank(1) {
                change(plan);
            }
        })
    };
    insta::assert_snapshot!(of_rank_1(|plan| _ = steps(plan).remove(0)), @"step 2 of lane 0 of rank 0 `wait ready from 1`: deadlock: the awaited flag is never signalled");
    insta::assert_snapshot!(of_rank_1(|plan| _ = steps(plan).pop()), @"step 7 of lane 0 of rank 0 `signal arrived 2.0 to 1`: no step waits for the signalled flag");
    insta::assert_snapshot!(of_rank_1(|plan| {
        let step = steps(plan)[0];
        steps(plan).insert(0, step);
    }), @"step 1 of lane 0 of rank 1 `signal ready to 0`: the flag is signalled twice in one start");
    insta::assert_snapshot!(of_rank_1(|plan| {
        let step = *steps(plan).last().unwrap();
        steps(plan).push(step);
    }), @"step 9 of lane 0 of rank 1: two waits in one start use the flag arrived 2.0");
    insta::assert_snapshot!(of_rank_1(|plan| {
        if let Step::Signal { peer, .. } = &mut steps(plan)[0] {
            *peer = Rank(7);
        }
    }), @"step 0 of lane 0 of rank 1: rank 7 does not exist, expected a rank below 3");
    let lane = LaneId(0);
    let missing = Cell { block: Rank(1), chunk: 5 };
    let of_rank_1_first = |step: Step| {
        refused(3, &layout, &Options::default(), |plan| {
            if plan.rank == Rank(1) {
                steps(plan).insert(0, step);
            }
        })
    };
    insta::assert_snapshot!(of_rank_1_first(Step::Reduce { cell: missing, from: Rank(0) }), @"step 0 of lane 0 of rank 1: cell 1.5 does not exist, expected a chunk below 1");
    let cell = Cell { block: Rank(2), chunk: 0 };
    insta::assert_snapshot!(of_rank_1_first(Step::Wait { flag: Flag::Contributed { cell, lane } }), @"step 0 of lane 0 of rank 1: the flag contributed 2.0 is one of a reduction, which the collective is not");
    insta::assert_snapshot!(of_rank_1(|plan| plan.lanes.push(plan.lanes[0].clone())), @"lanes of the plan of rank 1 is 2, expected 1");
    insta::assert_snapshot!(of_rank_1(|plan| plan.rank = Rank(2)), @"rank of the plan of rank 1 is 2, expected 1");
    insta::assert_snapshot!(of_rank_1(|plan| plan.chunks = 2), @"chunks of the plan of rank 1 is 2, expected 1");
}

#[test]
fn arguments_that_do_not_fit_together_are_named() {
    let layout = Layout::new(Collective::AllGather, &[100; 3], 1).unwrap();
    let options = Options::default();
    insta::assert_snapshot!(refused(4, &layout, &options, |_| {}), @"the layout has 3 ranks, expected 4, the number of ranks of the topology");
    let late = Options { delays: vec![0; 4], ..Options::default() };
    insta::assert_snapshot!(refused(3, &layout, &late, |_| {}), @"delays has 4 entries, expected at most 3, one for each rank");
    let traced = Options { traced: vec![Rank(3)], ..Options::default() };
    insta::assert_snapshot!(refused(3, &layout, &traced, |_| {}), @"traced names rank 3, which does not exist in the topology of 3 ranks on 1 node");
    let huge = Layout::new(Collective::AllGather, &[1 << 50; 3], 1).unwrap();
    insta::assert_snapshot!(refused(3, &huge, &options, |_| {}), @"step 1 of lane 0 of rank 0: cell 0.0 has 1125899906842624 bytes, expected at most 549755813886");
}

#[test]
fn what_is_too_large_is_refused_before_memory_is_taken() {
    let refused = |ranks, chunks| {
        let layout = Layout::new(Collective::AllGather, &vec![100; ranks], chunks).unwrap();
        let topology = Topology::flat(ranks).unwrap();
        let options = Options::default();
        let plan = |_| panic!("no plan is made");
        let links = Links::default();
        simulate::simulate(&topology, &layout, &links, &options, plan).unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(16_384, 64), @"16384 ranks with 64 chunks have 17985208320 flags, more than 335544320, the maximum of a simulation; use fewer ranks or chunks");
    insta::assert_snapshot!(refused(1 << 20, 1), @"1048576 ranks with 1 chunk have 4398048608256 flags, more than 335544320, the maximum of a simulation; use fewer ranks or chunks");
    insta::assert_snapshot!(refused(1024, 65_536), @"1024 ranks with 65536 chunks have 68722624512 flags, more than 335544320, the maximum of a simulation; use fewer ranks or chunks");
}

/// Returns the error of two ranks that signal each other this number of times, without copies.
fn refused_signals(links: &Links, signals: u32) -> String {
    let topology = Topology::flat(2).unwrap();
    let layout = Layout::new(Collective::AllGather, &[0; 2], signals).unwrap();
    let plan = |rank: Rank| {
        let peer = Rank(1 - rank.0);
        let mut plan = schedule::plan(Algorithm::Ring, &topology, rank, Shape::default())?;
        plan.chunks = signals;
        let lane = LaneId::HOME;
        let flag = |block, chunk| Flag::Arrived { cell: Cell { block, chunk }, lane };
        let pair = |chunk| {
            [Step::Signal { peer, flag: flag(rank, chunk) }, Step::Wait { flag: flag(peer, chunk) }]
        };
        plan.lanes[0].steps = (0..signals).flat_map(pair).collect();
        Ok(plan)
    };
    let options = Options::default();
    simulate::simulate(&topology, &layout, links, &options, plan).unwrap_err().to_string()
}

#[test]
fn times_beyond_the_clock_are_refused() {
    let layout = Layout::new(Collective::AllGather, &[1 << 34; 3], 1).unwrap();
    let topology = Topology::flat(3).unwrap();
    let refused = |links: &Links| {
        let plan = |rank| schedule::plan(Algorithm::Ring, &topology, rank, Shape::default());
        simulate::simulate(&topology, &layout, links, &Options::default(), plan)
            .unwrap_err()
            .to_string()
    };
    let mut slow = Links::default();
    slow.local.bytes_per_second = 1.0;
    insta::assert_snapshot!(refused(&slow), @"the simulated operation takes more than 106 days, the maximum of a simulation; use shorter blocks or faster links");

    // Here signals and waits take that long, which are no events.
    let mut slow = Links::default();
    slow.own.step_seconds = 1000.0;
    slow.local.flag_seconds = 1000.0;
    slow.local.step_seconds = 1000.0;
    insta::assert_snapshot!(refused_signals(&slow, 10_000), @"the simulated operation takes more than 106 days, the maximum of a simulation; use shorter blocks or faster links");
}

#[test]
fn more_nics_than_ranks_are_one_for_each_rank() {
    let topology = Topology::even(3, 2).unwrap();
    let layout = Layout::new(Collective::AllGather, &[1000; 6], 1).unwrap();
    let shape = Shape { tiers: true, ..Shape::default() };
    let simulated = |nics| {
        let mut links = Links::default();
        links.node.nics = nics;
        links.node.nic_bytes_per_second = Some(1e9);
        let plan = |rank| schedule::plan(Algorithm::Direct, &topology, rank, shape);
        simulate::simulate(&topology, &layout, &links, &Options::default(), plan).unwrap()
    };
    let one_each = simulated(None);
    for nics in [2, 3, 1 << 31, u32::MAX] {
        assert_eq!(simulated(Some(nics)), one_each, "{nics} NICs");
    }
    assert_ne!(simulated(Some(1)), one_each);
}
