//! Checks that starts of one plan can follow a start of another plan of the same operation.

use crate::plan::{Flag, Plan, Step};

/// Returns whether starts of `next` can follow a start of `first` without another proof.
///
/// Both plans are verified. `first` has one output, and its `ready` flags let it follow any start.
/// `next` has two outputs in turn, and a start of it relies only on what its rank learned in the
/// start before. If `next` is `first` without `ready`, then a start of `first` signals all that a
/// start of `next` signals, in the same order, so the next start knows as much behind either.
///
/// Flags of a later start than the signal are not without `ready`: `first` does not signal them.
///
/// Plans with inboxes in turn never follow. Their outputs are not used in turn, so the starts of
/// `first` would have to alternate inboxes, too.
pub fn can_follow(first: &Plan, next: &Plan) -> bool {
    let counts = |plan: &Plan| (plan.outputs, plan.inboxes);
    let is_alternating = counts(first) == (1, 1) && counts(next) == (2, 1);
    is_alternating
        && first.lanes.len() == next.lanes.len()
        && next.lane_ids().all(|lane| {
            let tier = |plan: &Plan| plan.lanes[lane.index()].tier;
            let rest = first.closed_lane(lane, |_| true).into_iter().filter(|step| !is_ready(step));
            let steps = next.closed_lane(lane, |_| true);

            let has_lag = steps.iter().filter_map(flag_of).any(|flag| flag.lag() > 0);
            tier(first) == tier(next) && !has_lag && rest.eq(steps)
        })
}

fn flag_of(step: &Step) -> Option<Flag> {
    match *step {
        Step::Signal { flag, .. } | Step::Wait { flag } => Some(flag),
        Step::Put { .. } | Step::Get { .. } | Step::Reduce { .. } => None,
    }
}

fn is_ready(step: &Step) -> bool {
    matches!(flag_of(step), Some(Flag::Ready { .. }))
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Rank;

    use super::*;
    use crate::collective::Collective;
    use crate::plan::{Algorithm, FlagOrder, LaneId};
    use crate::schedule::{Shape, plan};
    use crate::topology::Topology;

    fn plans(algorithm: Algorithm, (ranks, rank): (usize, u32), shape: Shape) -> Option<[Plan; 2]> {
        let topology = Topology::flat(ranks).unwrap();
        let plan = |outputs| plan(algorithm, &topology, Rank(rank), Shape { outputs, ..shape });
        Some([plan(1).ok()?, plan(2).ok()?])
    }

    #[test]
    fn plans_of_collectives_in_which_everyone_hears_from_everyone_follow() {
        for collective in Collective::ALL.iter().copied() {
            for (ranks, flags) in
                [(2, FlagOrder::Batched), (3, FlagOrder::Prompt), (5, FlagOrder::Batched)]
            {
                for rank in 0..ranks as u32 {
                    let shape = Shape { collective, flags, ..Shape::default() };
                    let pair = plans(Algorithm::Direct, (ranks, rank), shape);
                    let Some([first, next]) = pair else { continue };

                    let follows = can_follow(&first, &next);
                    let expected = collective.everyone_hears_from_everyone();
                    assert_eq!(follows, expected, "{collective}, rank {rank} of {ranks}");
                    assert!(!can_follow(&next, &next) && !can_follow(&first, &first));
                }
            }
        }
    }

    #[test]
    fn a_plan_with_inboxes_in_turn_does_not_follow() {
        let collective = Collective::ReduceScatter;
        let shape = Shape { collective, ..Shape::default() };
        let [first, next] = plans(Algorithm::Direct, (3, 1), shape).unwrap();
        let in_turn = Shape { inboxes: 2, ..shape };
        let [one_output, two_outputs] = plans(Algorithm::Direct, (3, 1), in_turn).unwrap();

        assert!(can_follow(&first, &next));
        for (first, next) in [
            (&first, &one_output),
            (&first, &two_outputs),
            (&one_output, &next),
            (&one_output, &two_outputs),
        ] {
            assert!(!can_follow(first, next), "{first}\n{next}");
        }
    }

    #[test]
    fn a_plan_that_does_other_steps_does_not_follow() {
        let shape = Shape { flags: FlagOrder::Batched, ..Shape::default() };
        let [first, next] = plans(Algorithm::Direct, (3, 1), shape).unwrap();
        assert!(can_follow(&first, &next));

        let steps = |plan: &Plan| plan.lanes[LaneId::HOME.index()].steps.len();
        for at in 0..steps(&next) {
            let mut fewer = next.clone();
            fewer.lanes[0].steps.remove(at);
            assert!(!can_follow(&first, &fewer), "without step {at}");

            let mut earlier = first.clone();
            let index =
                earlier.lanes[0].steps.iter().position(|step| *step == next.lanes[0].steps[at]);
            earlier.lanes[0].steps.remove(index.unwrap());
            assert!(!can_follow(&earlier, &next), "step {at} is missing before");
        }
        for at in 1..steps(&next) {
            let mut other = next.clone();
            other.lanes[0].steps.swap(at - 1, at);
            assert!(!can_follow(&first, &other), "steps {at} and the one before are exchanged");
        }
    }
}
