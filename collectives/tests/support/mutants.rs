//! Breaks plans in random ways.

use fastrand::Rng;
use peerlane_collectives::plan::{Cell, Flag, Lane, LaneId, Plan, Source, Step, Tier};
use peerlane_hal::Rank;

type Mutation = fn(&mut [Plan], &mut Rng) -> Option<String>;

const MUTATIONS: &[Mutation] = &[
    drop_step,
    duplicate_step,
    swap_neighbours,
    swap_neighbours_everywhere,
    move_within_lane,
    move_to_other_lane,
    retarget_peer,
    change_cell,
    change_flag,
    change_source,
    change_direction,
    change_tier,
    add_flag,
    flip_in_place,
    change_chunks,
    change_outputs,
];

/// Changes `plans` once and says how.
pub(crate) fn mutate(plans: &mut [Plan], rng: &mut Rng) -> String {
    loop {
        let mutation = rng.choice(MUTATIONS).unwrap();
        let before = plans.to_vec();
        if let Some(text) = mutation(plans, rng)
            && before != plans
        {
            return text;
        }
    }
}

/// A place of a step.
#[derive(Clone, Copy, Debug)]
struct Spot {
    rank: usize,
    lane: usize,
    at: usize,
}

fn spot(plans: &[Plan], rng: &mut Rng) -> Option<Spot> {
    let rank = rng.usize(..plans.len());
    let lane = rng.usize(..plans[rank].lanes.len());
    let steps = plans[rank].lanes[lane].steps.len();
    (steps > 0).then(|| Spot { rank, lane, at: rng.usize(..steps) })
}

fn steps(plans: &mut [Plan], spot: Spot) -> &mut Vec<Step> {
    &mut plans[spot.rank].lanes[spot.lane].steps
}

fn drop_step(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let step = steps(plans, spot).remove(spot.at);
    Some(format!("drop {step:?} at {spot:?}"))
}

fn duplicate_step(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let steps = steps(plans, spot);
    let to = rng.usize(spot.at..=steps.len());
    steps.insert(to, steps[spot.at]);
    Some(format!("duplicate {spot:?} to {to}"))
}

fn swap_neighbours(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let steps = steps(plans, spot);
    let other = (spot.at + 1) % steps.len();
    steps.swap(spot.at, other);
    Some(format!("swap {spot:?} with {other}"))
}

fn swap_neighbours_everywhere(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    for plan in plans {
        let steps = &mut plan.lanes[spot.lane].steps;
        if spot.at + 1 < steps.len() {
            steps.swap(spot.at, spot.at + 1);
        }
    }
    Some(format!("swap {spot:?} with the next in every rank"))
}

fn move_within_lane(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let steps = steps(plans, spot);
    let step = steps.remove(spot.at);
    let to = rng.usize(..=steps.len());
    steps.insert(to, step);
    Some(format!("move {spot:?} to {to}"))
}

fn move_to_other_lane(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let mut step = steps(plans, spot).remove(spot.at);
    let to_lane = rng.usize(..=plans[spot.rank].lanes.len());
    if to_lane == plans[spot.rank].lanes.len() {
        plans.iter_mut().for_each(|plan| plan.lanes.push(Lane::default()));
    }
    let lanes = &mut plans[spot.rank].lanes;
    let to = rng.usize(..=lanes[to_lane].steps.len());
    if let Step::Wait {
        flag: Flag::Ready { lane, .. } | Flag::Arrived { lane, .. } | Flag::Taken { lane, .. },
    } = &mut step
        && rng.bool()
    {
        *lane = LaneId(u32::try_from(to_lane).unwrap());
    }
    lanes[to_lane].steps.insert(to, step);
    Some(format!("move {spot:?} to lane {to_lane} at {to}"))
}

fn retarget_peer(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let to = any_rank(plans, rng);
    match &mut steps(plans, spot)[spot.at] {
        Step::Put { peer, .. } | Step::Get { peer, .. } | Step::Signal { peer, .. } => *peer = to,
        Step::Wait { .. } => return None,
    }
    Some(format!("retarget {spot:?} to {to}"))
}

fn change_cell(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let to = any_cell(plans, rng);
    match &mut steps(plans, spot)[spot.at] {
        Step::Put { cell, .. }
        | Step::Get { cell, .. }
        | Step::Signal { flag: Flag::Arrived { cell, .. }, .. }
        | Step::Wait { flag: Flag::Arrived { cell, .. } } => *cell = to,
        _ => return None,
    }
    Some(format!("cell {to} in {spot:?}"))
}

fn change_flag(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let to = any_flag(plans, rng);
    match &mut steps(plans, spot)[spot.at] {
        Step::Signal { flag, .. } | Step::Wait { flag } => *flag = to,
        Step::Put { .. } | Step::Get { .. } => return None,
    }
    Some(format!("{to:?} in {spot:?}"))
}

fn change_source(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let (Step::Put { from, .. } | Step::Get { from, .. }) = &mut steps(plans, spot)[spot.at] else {
        return None;
    };
    *from = if *from == Source::Input { Source::Output } else { Source::Input };
    Some(format!("other source in {spot:?}"))
}

/// A get instead of a put, or the other way round.
fn change_direction(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let spot = spot(plans, rng)?;
    let step = &mut steps(plans, spot)[spot.at];
    *step = match *step {
        Step::Put { peer, cell, from } => Step::Get { peer, cell, from },
        Step::Get { peer, cell, from } => Step::Put { peer, cell, from },
        Step::Signal { .. } | Step::Wait { .. } => return None,
    };
    Some(format!("other direction in {spot:?}"))
}

/// Of all ranks alike, or of one.
fn change_tier(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let tier = *rng.choice(Tier::ALL)?;
    let lanes = plans.iter().map(|plan| plan.lanes.len()).min()?;
    let lane = rng.usize(..lanes);
    if rng.bool() {
        plans.iter_mut().for_each(|plan| plan.lanes[lane].tier = tier);
        return Some(format!("lane {lane} of all ranks is {tier}"));
    }
    let plan = rng.choice(plans)?;
    plan.lanes[lane].tier = tier;
    Some(format!("lane {lane} of rank {} is {tier}", plan.rank))
}

/// A new flag from anywhere to anywhere, signalled and waited for.
fn add_flag(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let (signal, wait) = (spot(plans, rng)?, spot(plans, rng)?);
    let lane = LaneId(u32::try_from(wait.lane).unwrap());
    let flag = match any_flag(plans, rng) {
        Flag::Ready { from, .. } => Flag::Ready { from, lane },
        Flag::Arrived { cell, .. } => Flag::Arrived { cell, lane },
        Flag::Taken { by, .. } => Flag::Taken { by, lane },
        other => other,
    };
    let peer = Rank::at(wait.rank);
    steps(plans, signal).insert(signal.at, Step::Signal { peer, flag });
    steps(plans, wait).insert(wait.at, Step::Wait { flag });
    Some(format!("add {flag:?} from {signal:?} to {wait:?}"))
}

fn flip_in_place(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let plan = rng.choice(plans)?;
    plan.in_place = !plan.in_place;
    Some(format!("in_place of rank {}", plan.rank))
}

fn change_chunks(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let plan = rng.choice(plans)?;
    plan.chunks = rng.u32(0..=4);
    Some(format!("{} chunks of rank {}", plan.chunks, plan.rank))
}

/// Of all ranks alike, or of one.
fn change_outputs(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let outputs = rng.u32(0..=3);
    if rng.bool() {
        plans.iter_mut().for_each(|plan| plan.outputs = outputs);
        return Some(format!("{outputs} outputs of all ranks"));
    }
    let plan = rng.choice(plans)?;
    plan.outputs = outputs;
    Some(format!("{outputs} outputs of rank {}", plan.rank))
}

/// Mostly a rank that there is.
fn any_rank(plans: &[Plan], rng: &mut Rng) -> Rank {
    Rank::at(rng.usize(..plans.len()) + usize::from(rng.u8(..8) == 0))
}

fn any_cell(plans: &[Plan], rng: &mut Rng) -> Cell {
    let chunk = rng.u32(..plans[0].chunks.max(1)) + u32::from(rng.u8(..8) == 0);
    Cell { shard: any_rank(plans, rng), chunk }
}

fn any_flag(plans: &[Plan], rng: &mut Rng) -> Flag {
    let lane = LaneId(rng.u32(..3));
    match rng.u8(..7) {
        0 => Flag::Go { lane },
        1 => Flag::Sent { lane },
        2 | 3 => Flag::Ready { from: any_rank(plans, rng), lane },
        4 => Flag::Taken { by: any_rank(plans, rng), lane },
        _ => Flag::Arrived { cell: any_cell(plans, rng), lane },
    }
}
