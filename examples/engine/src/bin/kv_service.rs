//! Serves blocks of a key-value cache to several peers, which can cancel their requests.
//!
//! A client names a block and gives a signal. The server sends the block and a signal, one reply at
//! a time, or another signal if the client has cancelled its request in time.
//! `cargo run --bin kv_service`; ranks are threads.

use std::collections::VecDeque;
use std::time::Duration;

use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Channel, Error, Group, Rank, host};

const CLIENTS: u32 = 3;
const SERVER: Rank = Rank(0);
const REQUESTS: u32 = 50;
const SOON: Duration = Duration::from_secs(20);

/// The cache: block `i` consists of the number `i`.
const BLOCKS: usize = 8;
const BLOCK_LEN: usize = 100_000;
/// Where a client receives a block. Behind it, each client has three elements in the window of the
/// server: the block and the number of its request, and the number of the one that it cancels.
const INBOX: usize = BLOCKS * BLOCK_LEN;
const MAILBOXES: usize = INBOX + BLOCK_LEN;
const WINDOW_LEN: usize = MAILBOXES + 3 * (CLIENTS as usize + 1);

/// Signals of clients to the server, and of the server to clients.
const REQUEST: usize = 0;
const CANCEL: usize = 1;
const REPLY: usize = 0;
const CANCELLED: usize = 1;

fn main() -> Result<(), Error> {
    let answers = in_process::run(1 + CLIENTS as usize, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let window = group.window::<u32>(WINDOW_LEN)?;
        let mut channel = group.channel(&window, 2)?;
        let is_server = channel.rank() == SERVER;
        let answers = if is_server { serve(&mut channel)? } else { request(&mut channel)? };
        group.close_channel(channel)?;
        group.close().map(|()| answers)
    })?;

    let [replies, cancelled] = answers[SERVER.index()];
    assert_eq!(answers[1..].iter().map(|answers| answers[0]).sum::<u32>(), replies);
    println!("{replies} requests of {CLIENTS} clients were served, {cancelled} cancelled");
    Ok(())
}

/// Serves all requests. Returns how many got a block and how many were cancelled.
fn serve(channel: &mut Channel<u32>) -> Result<[u32; 2], Error> {
    for block in 0..BLOCKS {
        channel.write(block * BLOCK_LEN, &[block as u32; BLOCK_LEN])?;
    }

    let of_clients = |signal| (1..=CLIENTS).map(move |client| (Rank(client), signal));
    let signals: Vec<(Rank, usize)> = of_clients(REQUEST).chain(of_clients(CANCEL)).collect();
    let mut waiting: VecDeque<(Rank, [u32; 2])> = VecDeque::new();
    let mut reply = None;
    let mut answers = [0; 2];

    while answers.iter().sum::<u32>() < CLIENTS * REQUESTS || reply.is_some() {
        if reply.is_none() && !waiting.is_empty() {
            let (client, [block, _]) = waiting.remove(0).expect("a client waits");
            let begin = block as usize * BLOCK_LEN;
            reply = Some(channel.put_signal(client, begin..begin + BLOCK_LEN, INBOX, REPLY)?);
            answers[0] += 1;
        }

        // Whatever comes first: a request, a cancellation, or the end of the reply.
        let events = signals.iter().map(|(client, signal)| channel.next_signal(*client, *signal));
        let events: Vec<_> = events.chain(reply.map(Into::into)).collect();
        let Some(&(client, signal)) = signals.get(channel.wait_any(&events, SOON)?) else {
            reply = None;
            continue;
        };

        let mut mailbox = [0; 3];
        channel.read(MAILBOXES + 3 * client.index(), &mut mailbox)?;
        let [block, number, cancelled] = mailbox;
        let is_cancelled = |of: &(Rank, [u32; 2])| of.0 == client && of.1[1] == cancelled;
        if signal == REQUEST {
            waiting.push_back((client, [block, number]));
        } else if let Some(index) = waiting.iter().position(is_cancelled) {
            // A reply that has begun is not cancelled.
            waiting.remove(index);
            channel.signal(client, CANCELLED)?;
            answers[1] += 1;
        }
    }
    Ok(answers)
}

/// Makes all requests of a client, and cancels every third one. Returns the same counts.
fn request(channel: &mut Channel<u32>) -> Result<[u32; 2], Error> {
    let mut answers = [0; 2];
    let mailbox = MAILBOXES + 3 * channel.rank().index();

    for number in 1..=REQUESTS {
        let block = number % BLOCKS as u32;
        channel.write(mailbox, &[block, number])?;
        channel.put_signal(SERVER, mailbox..mailbox + 2, mailbox, REQUEST)?;
        if number % 3 == 0 {
            channel.write(mailbox + 2, &[number])?;
            channel.put_signal(SERVER, mailbox + 2..mailbox + 3, mailbox + 2, CANCEL)?;
        }

        let ends = [REPLY, CANCELLED].map(|signal| channel.next_signal(SERVER, signal));
        let end = channel.wait_any(&ends, SOON)?;
        answers[end] += 1;

        if end == REPLY {
            let mut received = vec![0; BLOCK_LEN];
            channel.read(INBOX, &mut received)?;
            assert!(received.iter().all(|element| *element == block), "request {number}");
        }
    }
    Ok(answers)
}
