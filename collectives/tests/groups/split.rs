//! Groups that are split from a group: their ranks, their memory, their ends, and progress across them.

use std::fs;
use std::sync::Barrier;
use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;

use crate::support::group::in_group;
use crate::support::own_process::run_in_own_process;

const SOON: Duration = Duration::from_secs(20);
/// The number of elements of a block that a rank does not put before its peer is ready.
const LEN: usize = 300_000;

/// Gathers a number of each rank, so that the result names the ranks of a group.
fn gather(group: &mut Group, own: u32) -> Result<Vec<u32>, Error> {
    let mut gather = group.all_gather::<u32>(1).prepare()?;
    let mut gathered = Vec::new();
    for start in 0..3 {
        gather.input_mut()?[0] = own + 100 * start;
        gather.run()?;
        let output: Vec<_> = gather.output()?.iter().map(|value| value - 100 * start).collect();
        assert!(start == 0 || output == gathered, "start {start}");
        gathered = output;
    }
    Ok(gathered)
}

#[test]
fn ranks_of_one_color_are_ordered_by_key_and_then_by_rank() {
    for n in 1..=9_u32 {
        in_group(n as usize, |world| {
            let rank = world.rank().0;
            for colors in 1..=n.min(4) {
                let color = rank % colors;
                let backwards: Vec<_> = (0..n).rev().filter(|it| it % colors == color).collect();
                let mut group = world.split(Some(color), -i64::from(rank))?.unwrap();
                assert_eq!(gather(&mut group, rank)?, backwards, "n={n}");
                assert_eq!(group.ranks(), backwards.len());
                group.barrier()?;
                group.close()?;
                let mut group = world.split(Some(color), 7)?.unwrap();
                let forwards: Vec<_> = backwards.into_iter().rev().collect();
                assert_eq!(gather(&mut group, rank)?, forwards, "n={n}");
                group.close()?;
            }
            assert_eq!(gather(world, rank)?, (0..n).collect::<Vec<_>>());
            Ok(())
        });
    }
}

#[test]
fn a_rank_without_a_color_gets_no_group() {
    in_group(5, |world| {
        let rank = world.rank().0;
        let color = (rank != 2).then_some(0);
        let group = world.split(color, 0)?;
        assert_eq!(group.is_some(), rank != 2);
        if let Some(mut group) = group {
            assert_eq!(gather(&mut group, rank)?, [0, 1, 3, 4]);
            group.close()?;
        }
        world.barrier()
    });
}

#[test]
fn a_list_gives_the_order_and_groups_can_be_split_again() {
    in_group(8, |world| {
        let rank = world.rank().0;
        let list: Vec<_> = [6, 2, 4, 0].map(|even| Rank(even + rank % 2)).into();
        let mut group = world.subgroup(&list)?;
        assert_eq!(gather(&mut group, rank)?, list.iter().map(|rank| rank.0).collect::<Vec<_>>());
        let mut pair = group.split(Some(group.rank().0 / 2), 0)?.unwrap();
        let is_first = list[..2].contains(&Rank(rank));
        let both = if is_first { [6, 2] } else { [4, 0] };
        assert_eq!(gather(&mut pair, rank)?, both.map(|even| even + rank % 2));
        pair.close()?;
        group.close()
    });
}

#[test]
fn every_collective_runs_and_so_do_windows_and_channels() {
    in_group(6, |world| {
        let rank = world.rank().0;
        let mut group = world.split(Some(rank % 2), 0)?.unwrap();
        let own = group.rank().0;
        let mut broadcast = group.broadcast::<u32>(Rank(1), 1).prepare()?;
        if own == 1 {
            broadcast.input_mut()?[0] = rank;
        }
        broadcast.run()?;
        assert_eq!(broadcast.output()?, [2 + rank % 2]);
        let mut all_to_all = group.all_to_all::<u32>(1).prepare()?;
        all_to_all.input_mut()?.copy_from_slice(&[10 * own, 10 * own + 1, 10 * own + 2]);
        all_to_all.run()?;
        assert_eq!(all_to_all.output()?, [own, 10 + own, 20 + own]);
        // More than the blocks that the group begins with.
        let mut large = group.all_gather::<u32>(100_000).prepare()?;
        large.input_mut()?.fill(rank);
        large.run()?;
        assert_eq!(large.output()?[250_000], 4 + rank % 2);
        let window = group.window::<u32>(3)?;
        let mut channel = group.channel(&window, 1)?;
        channel.write(0, &[rank])?;
        channel.put_signal(Rank((own + 1) % 3), 0..1, 2, 0)?;
        channel.wait(Rank((own + 2) % 3), 0, SOON)?;
        let mut put = [0];
        channel.read(2, &mut put)?;
        assert_eq!(put[0], rank % 2 + (own + 2) % 3 * 2);
        drop(channel);
        drop((broadcast, all_to_all, large));
        group.release(window)?;
        group.close()
    });
}

#[test]
fn blocks_of_closed_groups_are_used_again() {
    in_group(4, |world| {
        let rank = world.rank().0;
        // 64 KiB of each group fill the first segment of the heap 6 times.
        let mut others = Vec::new();
        for round in 0..200 {
            let color = if round % 3 == 0 { rank / 2 } else { rank % 2 };
            let mut group = world.split(Some(color), 0)?.unwrap();
            let members = gather(&mut group, rank + 1000 * round)?;
            let other = if round % 3 == 0 { rank ^ 1 } else { rank ^ 2 };
            assert_eq!(members.len(), 2);
            assert!(members.contains(&(other + 1000 * round)), "{members:?}");
            if round % 50 == 0 {
                others.push(group);
            } else {
                group.close()?;
            }
        }
        for group in &mut others {
            gather(group, rank)?;
        }
        others.into_iter().try_for_each(Group::close)
    });
}

#[test]
fn the_arguments_of_a_split_are_checked_on_all_ranks() {
    let texts = in_group(4, |world| {
        let own = world.rank();
        let lists: [&[u32]; 5] = [&[0, 1, 1], &[0, 9], &[0, 2], &[0, 1], &[]];
        let mut texts = Vec::new();
        for list in lists {
            let list: Vec<_> = list.iter().map(|rank| Rank(*rank)).collect();
            // Rank 1 gives the list in question.
            let list = if own == Rank(1) { list } else { vec![own] };
            texts.push(world.subgroup(&list).unwrap_err());
        }
        let options = match own.0 {
            1 => GroupOptions::default().timeout(Duration::ZERO),
            _ => GroupOptions::default(),
        };
        texts.push(world.split_with(options, Some(0), 0).unwrap_err());
        let options = match own.0 {
            3 => GroupOptions::default().strict(true),
            _ => GroupOptions::default(),
        };
        texts.push(world.split_with(options, Some(own.0 % 2), 0).unwrap_err());
        let mixed = match own.0 {
            0 => world.subgroup(&[Rank(0), Rank(2)]).map(drop),
            _ => world.split(Some(0), 0).map(drop),
        };
        texts.push(mixed.unwrap_err());
        let topology = peerlane_collectives::topology::Topology::flat(4).unwrap();
        let options = GroupOptions::default().topology(topology);
        texts.push(world.split_with(options, Some(0), 0).unwrap_err());
        // The group goes on.
        let mut group = world.split(Some(own.0 % 2), 0)?.unwrap();
        gather(&mut group, own.0)?;
        group.close()?;
        Ok(texts)
    });
    let text =
        |rank: usize| texts[rank].iter().map(Error::to_string).collect::<Vec<_>>().join("\n");
    assert_snapshot!(text(1), @r#"
    ranks names rank 1 twice, expected each rank once
    ranks names rank 9, expected ranks below 4
    ranks is [0, 2], expected a list with this rank, 1
    split 1: ranks disagree: rank 1 wants a group of ranks 0 and 1, rank 0 wants one of rank 0
    ranks is [], expected a list with this rank, 1
    timeout is 0 s, expected more than 0 s
    split 2: ranks disagree: strict is true on rank 3, false on rank 1
    split 3: ranks disagree: rank 0 wants a group of ranks 0 and 2, rank 2 calls `split`
    topology is set, expected none: a group that is split from another one uses that group's
    "#);
    assert_snapshot!(text(2), @r#"
    split 1: rank 1 failed (invalid argument): ranks names rank 1 twice, expected each rank once
    split 1: rank 1 failed (invalid argument): ranks names rank 9, expected ranks below 4
    split 1: rank 1 failed (invalid argument): ranks is [0, 2], expected a list with this rank, 1
    split 1: ranks disagree: rank 1 wants a group of ranks 0 and 1, rank 0 wants one of rank 0
    split 2: rank 1 failed (invalid argument): ranks is [], expected a list with this rank, 1
    split 2: rank 1 failed (invalid argument): timeout is 0 s, expected more than 0 s
    split 2: ranks disagree: strict is true on rank 3, false on rank 1
    split 3: ranks disagree: rank 0 wants a group of ranks 0 and 2, rank 2 calls `split`
    topology is set, expected none: a group that is split from another one uses that group's
    "#);
    let peers: Vec<_> = texts[2].iter().map(|error| error.peer().map(|rank| rank.0)).collect();
    assert_eq!(peers[..6], [1, 1, 1, 0, 1, 1].map(Some));
}

#[test]
fn a_rank_that_calls_something_else_is_named() {
    let errors = in_process::run(3, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut world = Group::open(bootstrap, fabric)?;
        world.barrier()?;
        let error = match world.rank().0 {
            1 => world.all_gather::<u32>(1).prepare().map(drop).unwrap_err(),
            _ => world.split(Some(0), 0).map(drop).unwrap_err(),
        };
        // Dropped when all ranks have their error.
        Ok((error, world))
    });
    for (error, _world) in errors.unwrap() {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    }
}

#[test]
fn a_group_ends_with_the_group_that_it_was_split_from() {
    let errors = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut world = Group::open(bootstrap, fabric)?;
        let mut group = world.split(Some(0), 0)?.unwrap();
        let mut inner = group.split(Some(0), 0)?.unwrap();
        let mut gather = inner.all_gather::<u32>(1).prepare()?;
        gather.run()?;
        let end = inner.end()?;
        world.close()?;
        let watch = Stopwatch::start();
        let errors = [
            gather.run().unwrap_err(),
            group.barrier().unwrap_err(),
            inner.split(None, 0).unwrap_err(),
            end.check().unwrap_err(),
            group.close().unwrap_err(),
        ];
        watch.assert_within(Duration::from_secs(1));
        Ok(errors)
    });
    for error in errors.unwrap().into_iter().flatten() {
        assert_eq!(error.kind(), ErrorKind::Aborted);
        // The second group was split from the first one.
        let text = error.to_string();
        let text = text.strip_prefix("group \"split 1, color 0").unwrap();
        let text = text.strip_prefix(", split 1, color 0").unwrap_or(text);
        let text = text.strip_prefix("\": ").unwrap();
        assert_eq!(text, "the group that this one was split from has been closed or dropped");
    }
}

#[test]
fn a_lost_rank_ends_the_groups_that_hold_it_and_no_others() {
    let gathered = Barrier::new(4);
    in_process::run(4, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut world = Group::open(bootstrap, fabric)?;
        let rank = world.rank().0;
        let mut rows = world.split(Some(rank / 2), 0)?.unwrap();
        let mut columns = world.split(Some(rank % 2), 0)?.unwrap();
        gather(&mut rows, rank)?;
        gather(&mut columns, rank)?;
        gathered.wait();
        if rank == 3 {
            return Ok(()); // All its groups are dropped.
        }
        for (group, holds) in [(&mut rows, rank == 2), (&mut columns, rank == 1)] {
            if holds {
                let error = group.barrier().unwrap_err();
                assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
                assert_eq!(group.shrink().unwrap_err().kind(), ErrorKind::Unavailable);
            } else {
                assert_eq!(gather(group, rank)?.len(), 2);
                assert!(group.abort_record().is_none());
            }
        }
        let error = world.barrier().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(3))));
        // What holds lost ranks is dropped; the others end together.
        match rank {
            0 => {
                rows.close()?;
                columns.close()
            }
            1 => rows.close(),
            _ => columns.close(),
        }
    })
    .unwrap();
}

#[test]
fn groups_that_are_waited_for_in_any_order_complete() {
    for (ranks, bits) in [(4, 2), (8, 3)] {
        in_group(ranks, |world| {
            let rank = world.rank().0;
            let mut random = fastrand::Rng::with_seed(34 + u64::from(rank));
            // One group for each bit: of the ranks that differ in this bit alone.
            let groups = (0..bits).map(|bit| world.split(Some(rank & !(1 << bit)), 0));
            let mut groups =
                groups.map(|group| Ok(group?.unwrap())).collect::<Result<Vec<_>, Error>>()?;
            let prepare = |group: &mut Group| group.all_gather::<u32>(LEN).prepare();
            let mut gathers = groups.iter_mut().map(prepare).collect::<Result<Vec<_>, Error>>()?;
            for round in 0..30 {
                for gather in &mut gathers {
                    gather.input_mut()?.fill(rank + round);
                }
                let mut started = Vec::new();
                for gather in &mut gathers {
                    if random.u8(..) < 40 {
                        std::thread::sleep(Duration::from_micros(random.u64(..300)));
                    }
                    started.push(gather.start()?);
                }
                random.shuffle(&mut started);
                for gather in started {
                    gather.wait()?;
                }
                for (bit, gather) in gathers.iter_mut().enumerate() {
                    let output = gather.output()?;
                    let low = rank & !(1 << bit);
                    let both = [low + round, (low | 1 << bit) + round];
                    assert_eq!([output[0], output[LEN]], both, "round {round}");
                }
            }
            drop(gathers);
            groups.into_iter().try_for_each(Group::close)
        });
    }
}

/// Each rank waits for a peer that has to put its block in the other group first.
#[test]
fn waiting_for_one_group_moves_the_other() {
    let together = Barrier::new(4);
    in_group(4, |world| {
        let rank = world.rank().0;
        let mut rows = world.split(Some(rank / 2), 0)?.unwrap();
        let mut columns = world.split(Some(rank % 2), 0)?.unwrap();
        let mut row = rows.all_gather::<u32>(LEN).prepare()?;
        let mut column = columns.all_gather::<u32>(LEN).prepare()?;
        // Whoever starts first puts its block later, when its peer is ready.
        let is_first = rank == 0 || rank == 3;
        let (row, column) = if is_first {
            let row = row.start()?;
            together.wait();
            together.wait();
            together.wait();
            (row, column.start()?)
        } else {
            together.wait();
            let row = row.start()?;
            together.wait();
            let column = column.start()?;
            together.wait();
            (row, column)
        };
        let (one, other) = if is_first { (column, row) } else { (row, column) };
        one.wait()?;
        other.wait()?;
        rows.close()?;
        columns.close()
    });
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).unwrap().count()
}

/// All ranks are threads of this process, so the threads and descriptors of all of them are counted.
fn count_threads_and_descriptors_of_many_groups() {
    let together = Barrier::new(8);
    in_group(8, |world| {
        let rank = world.rank().0;
        gather(world, rank)?;
        together.wait();
        let before = (count("/proc/self/task"), count("/proc/self/fd"));
        together.wait();
        let split = |color: u32| Ok(world.split(Some(rank % (1 + color % 4)), 0)?.unwrap());
        let mut groups = (0..64).map(split).collect::<Result<Vec<Group>, Error>>()?;
        for group in &mut groups {
            gather(group, rank)?;
        }
        together.wait();
        let after = (count("/proc/self/task"), count("/proc/self/fd"));
        together.wait();
        // The heap of the first group has doubled a few times; each segment has a descriptor.
        assert_eq!(after.0, before.0, "threads");
        assert!(after.1 <= before.1 + 2 * 8 * 9, "{} descriptors, then {}", before.1, after.1);
        groups.into_iter().try_for_each(Group::close)
    });
}

#[test]
fn sixty_four_groups_need_no_thread_and_no_descriptor() {
    let test = "split::sixty_four_groups_need_no_thread_and_no_descriptor";
    run_in_own_process(test, count_threads_and_descriptors_of_many_groups);
}

#[test]
fn a_rank_that_holds_up_others_through_another_group_is_named() {
    let over = Barrier::new(4);
    let errors = in_process::run(4, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let timeout = Duration::from_secs(2);
        let mut world = GroupOptions::default().timeout(timeout).open(bootstrap, fabric)?;
        let rank = world.rank().0;
        // Ranks 3, 2 and 1, in this order, wait longer than the world.
        let options = GroupOptions::default().timeout(SOON);
        let mut others = world.split_with(options, (rank > 0).then_some(0), -i64::from(rank))?;
        world.barrier()?;
        let error = match (rank, &mut others) {
            (0, _) => world.barrier().unwrap_err(),
            (3, _) => {
                // Rank 3 is late, and ranks 1 and 2 cannot come because they wait for it.
                while world.abort_record().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                others.as_mut().unwrap().barrier()?;
                world.barrier().unwrap_err()
            }
            (_, Some(others)) => {
                others.barrier()?;
                world.barrier().unwrap_err()
            }
            _ => unreachable!(),
        };
        over.wait();
        Ok((error.kind(), error.peer()))
    });
    assert_eq!(errors.unwrap(), [(ErrorKind::Timeout, Some(Rank(3))); 4]);
}
