//! What cannot be simulated says why.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Links;
use peerlane_collectives::layout::Layout;
use peerlane_collectives::plan::{Algorithm, Plan, Step};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;
use peerlane_planning::simulate::{self, Options};

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
    let topology = Topology::flat(16_384).unwrap();
    let layout = Layout::new(Collective::AllGather, &[100; 16_384], 64).unwrap();
    let shape = Shape { chunks: 64, ..Shape::default() };
    let plan = |rank| schedule::plan(Algorithm::Ring, &topology, rank, shape);
    let options = Options::default();
    let error = simulate::simulate(&topology, &layout, &Links::default(), &options, plan);
    insta::assert_snapshot!(error.unwrap_err(), @"16384 ranks with 64 chunks need more than 536870912 steps, the maximum of a simulation; use fewer ranks or chunks");
}
