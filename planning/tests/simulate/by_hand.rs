//! Small plans whose times can be worked out in the head.

use peerlane_hal::Rank;
use peerlane_planning::cost::{CacheFactor, Link, Links};
use peerlane_planning::simulate::{PathStep, Slice};

use super::{Case, link, links};

const PICO: f64 = 1e-12;

/// Rank 0 puts its block to rank 1, which waits for it.
fn one_put() -> Case {
    Case::new(
        &[0, 0],
        false,
        &[&["put 0.0 input to 1; signal arrived 0.0 to 1"], &["wait arrived 0.0"]],
    )
}

/// Ranks 1 and 2 put their blocks to rank 0.
fn two_into_one() -> Case {
    let put = |rank| format!("put {rank}.0 input to 0; signal arrived {rank}.0 to 0");
    Case::new(&[0, 0, 0], false, &[&["wait arrived 1.0; wait arrived 2.0"], &[&put(1)], &[&put(2)]])
}

#[test]
fn a_put_takes_its_latency_its_bytes_and_a_flag() {
    let mut links = links();
    assert_eq!(one_put().ends(&links), [1000, 1000]);
    links.local.put_seconds = 100.0 * PICO;
    links.local.flag_seconds = 30.0 * PICO;
    links.local.step_seconds = 7.0 * PICO;
    // The signal takes effect at 1100 and keeps its lane for 7 more.
    assert_eq!(one_put().ends(&links), [1107, 1130]);
    // Late readers find the flag there and take a step to see it, which is the link's to oneself.
    links.own.step_seconds = 5.0 * PICO;
    assert_eq!(one_put().delayed(&[0, 2000]).ends(&links), [1107, 2005]);
    links.start_seconds = 10_000.0 * PICO;
    assert_eq!(one_put().ends(&links), [11_107, 11_130]);
}

#[test]
fn a_flow_is_no_faster_than_the_slowest_of_what_it_uses() {
    let slow = [
        |links: &mut Links| links.local.bytes_per_second = 5e11,
        |links: &mut Links| links.local.engine_bytes_per_second = 5e11,
        |links: &mut Links| links.local.send_bytes_per_second = 5e11,
        |links: &mut Links| links.local.receive_bytes_per_second = 5e11,
    ];
    for (index, change) in slow.into_iter().enumerate() {
        let mut links = links();
        change(&mut links);
        assert_eq!(one_put().ends(&links), [2000, 2000], "{index}");
    }
}

#[test]
fn flows_into_one_rank_share_its_way_in() {
    let simulation = two_into_one().run(&links()).unwrap();
    assert_eq!(simulation.ends_ps, [2000, 2000, 2000]);
    assert_eq!((simulation.incast[0].flows, simulation.incast[0].rank), (2, Rank(0)));
    assert_eq!(simulation.incast[1].flows, 0);
    // Half is through when the second begins; both are at half speed until the first ends at 1500.
    let late = two_into_one().delayed(&[0, 0, 500]);
    assert_eq!(late.ends(&links()), [2000, 1500, 2000]);
    // With room for both nobody waits.
    let mut wide = links();
    wide.local.receive_bytes_per_second = 2e12;
    assert_eq!(two_into_one().ends(&wide), [1000, 1000, 1000]);
}

#[test]
fn lanes_of_one_rank_share_its_way_out() {
    let case = Case::new(
        &[0, 0, 0],
        false,
        &[
            &[
                "put 0.0 input to 1; signal arrived 0.0 to 1",
                "put 0.0 input to 2; signal arrived 0.0 to 2",
            ],
            &["wait arrived 0.0", ""],
            &["wait arrived 0.0", ""],
        ],
    );
    assert_eq!(case.ends(&links()), [2000, 2000, 2000]);
    let mut wide = links();
    wide.local.send_bytes_per_second = 2e12;
    assert_eq!(case.ends(&wide), [1000, 1000, 1000]);
    // One thread makes the copies of both lanes.
    wide.local.by_processor = true;
    assert_eq!(case.ends(&wide), [2000, 2000, 2000]);
}

#[test]
fn ranks_of_a_node_share_cards_processors_and_memory() {
    let put = |to| format!("put {}.0 input to {to}; signal arrived {}.0 to {to}", to - 2, to - 2);
    let wait = |from| format!("wait arrived {from}.0");
    let across = |network| {
        Case::new(
            &[0, 0, 1, 1],
            network,
            &[&["", &put(2)], &["", &put(3)], &[&wait(0), ""], &[&wait(1), ""]],
        )
    };
    assert_eq!(across(true).ends(&links()), [1000; 4]);
    let mut cards = links();
    cards.node.nics = Some(1);
    assert_eq!(across(true).ends(&cards), [1000; 4], "a card without a limit is none");
    cards.node.nic_bytes_per_second = Some(1e12);
    let simulation = across(true).run(&cards).unwrap();
    assert_eq!(simulation.ends_ps, [2000; 4]);
    assert_eq!((simulation.nic_incast.flows, simulation.nic_incast.rank), (2, Rank(2)));
    cards.node.nics = Some(2);
    assert_eq!(across(true).ends(&cards), [1000; 4]);
    assert_eq!(across(false).ends(&cards), [1000; 4], "no card carries what stays inside");

    let mut host = links();
    host.local.by_processor = true;
    host.node.processors = Some(2);
    assert_eq!(across(false).ends(&host), [1000; 4]);
    host.node.processors = Some(1);
    assert_eq!(across(false).ends(&host), [2000; 4]);
    host.node.processors = None;
    host.node.copy_bytes_per_second = Some(5e11);
    assert_eq!(across(false).ends(&host), [4000; 4]);
}

/// Rank 0 puts its block to ranks 1, 2 and 3.
fn three_puts() -> Case {
    let to = |peer| format!("put 0.0 input to {peer}; signal arrived 0.0 to {peer}");
    let steps = [to(1), to(2), to(3)].join("; ");
    Case::new(
        &[0; 4],
        false,
        &[&[&steps], &["wait arrived 0.0"], &["wait arrived 0.0"], &["wait arrived 0.0"]],
    )
}

#[test]
fn puts_in_flight_hide_the_cost_of_issuing() {
    let mut links = links();
    links.local.put_seconds = 100.0 * PICO;
    assert_eq!(three_puts().ends(&links), [3300, 1100, 2200, 3300]);
    links.local.puts_in_flight = 2;
    // The first is alone for 100, then both share the engine; the third follows the first.
    assert_eq!(three_puts().ends(&links), [3100, 2000, 2100, 3100]);
    // An engine that is faster than one flow.
    links.local.engine_bytes_per_second = 2e12;
    links.local.send_bytes_per_second = 2e12;
    assert_eq!(three_puts().ends(&links), [2200, 1100, 1200, 2200]);
}

#[test]
fn a_signal_does_not_pass_puts_to_its_reader() {
    let mut links = links();
    links.local.puts_in_flight = 4;
    let case = Case::new(
        &[0; 3],
        false,
        &[
            &[
                "put 0.0 input to 1; signal ready to 2; signal arrived 0.0 to 1; signal go lane 1 to 0",
                "wait go lane 1",
            ],
            &["wait arrived 0.0", ""],
            &["wait ready from 0", ""],
        ],
    );
    // The one to rank 2 has nothing before it; the own one waits for all.
    let simulation = case.run(&links).unwrap();
    assert_eq!(simulation.ends_ps, [1000, 1000, 0]);
}

#[test]
fn gets_move_bytes_the_other_way() {
    let case = Case::new(
        &[0, 0, 0],
        false,
        &[
            &["wait taken by 1; wait taken by 2"],
            &["get 0.0 input of 0; signal taken to 0"],
            &["get 0.0 input of 0; signal taken to 0"],
        ],
    );
    let simulation = case.run(&links()).unwrap();
    assert_eq!(simulation.ends_ps, [2000; 3], "both read from one rank");
    assert_eq!(simulation.incast[0].flows, 1);
    let sent: Vec<_> = simulation.ranks.iter().map(|rank| rank.traffic[1].sent_bytes).collect();
    assert_eq!(sent, [2000, 0, 0]);
}

#[test]
fn the_critical_path_names_what_held_up_the_last_rank() {
    let mut links = links();
    links.local.put_seconds = 100.0 * PICO;
    links.local.flag_seconds = 30.0 * PICO;
    let path = |case: &Case| {
        let stages = case.run(&links).unwrap().critical_path;
        let text = |step: &PathStep| format!("{} to {}: {step}", step.begin_ps, step.end_ps);
        stages.iter().map(text).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(path(&three_puts()), @"
    0 to 1100: rank 0 lane 0: put 0.0 input to 1
    1100 to 1100: rank 0 lane 0: signal arrived 0.0 to 1
    1100 to 2200: rank 0 lane 0: put 0.0 input to 2
    2200 to 2200: rank 0 lane 0: signal arrived 0.0 to 2
    2200 to 3300: rank 0 lane 0: put 0.0 input to 3
    3300 to 3300: rank 0 lane 0: signal arrived 0.0 to 3
    3300 to 3330: rank 3 lane 0: wait arrived 0.0
    ");
    insta::assert_snapshot!(path(&two_into_one().delayed(&[0, 0, 500])), @"
    0 to 2100: rank 2 lane 0: put 2.0 input to 0
    2100 to 2100: rank 2 lane 0: signal arrived 2.0 to 0
    2100 to 2130: rank 0 lane 0: wait arrived 2.0
    ");
}

#[test]
fn slices_are_of_the_ranks_that_are_asked_for() {
    let mut case = two_into_one();
    case.options.traced = vec![Rank(2), Rank(0), Rank(2)];
    let mut links = links();
    links.local.put_seconds = 100.0 * PICO;
    links.local.flag_seconds = 30.0 * PICO;
    let slices = case.run(&links).unwrap().slices;
    let text = |slice: &Slice| format!("{} to {}: {slice}", slice.begin_ps, slice.end_ps);
    insta::assert_snapshot!(slices.iter().map(text).collect::<Vec<_>>().join("\n"), @"
    0 to 2130: rank 0 lane 0: wait arrived 1.0
    2130 to 2130: rank 0 lane 0: wait arrived 2.0
    0 to 2100: rank 2 lane 0: put 2.0 input to 0
    2100 to 2100: rank 2 lane 0: signal arrived 2.0 to 0
    ");
}

#[test]
fn memory_beyond_the_caches_is_slower() {
    let mut links = links();
    links.local = Link { by_processor: true, ..link() };
    let (bytes, factor, gets_factor) = (1, 3.0, None);
    links.node.cache_factors = vec![CacheFactor { bytes, factor, gets_factor }];
    assert_eq!(one_put().ends(&links), [3000, 3000]);
}

#[test]
fn a_host_that_is_slower_than_its_engines_sets_the_pace() {
    let mut links = links();
    links.local.submit_seconds = 300.0 * PICO;
    assert_eq!(three_puts().ends(&links)[0], 3000);
    links.local.submit_seconds = 1500.0 * PICO;
    let simulation = three_puts().run(&links).unwrap();
    assert_eq!(simulation.ends_ps, [4500, 1000, 2000, 3000]);
    assert_eq!(simulation.ranks[0].host_ps, 4500);
}
