use super::*;
use proptest::prelude::*;

const LEAST: Duration = Duration::from_millis(500);
const MIB: u64 = 1 << 20;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn the_limit_is_four_times_what_the_bytes_need_where_that_is_longer() {
    // A tenth of 100 Gbit/s.
    let pace = Pace::new(100_000);
    assert_eq!(pace.rate(), 1_250_000_000);
    assert_eq!(pace.limit(LEAST, 0), LEAST);
    assert_eq!(pace.limit(LEAST, 8 * MIB), LEAST);
    assert_eq!(pace.limit(LEAST, 1_250_000_000), ms(4000));
    assert_eq!(pace.limit(ms(5000), 1_250_000_000), ms(5000));
    // A port that tells no speed.
    assert_eq!(Pace::new(0).limit(LEAST, 125_000_000), ms(4000));
    // Nothing overflows.
    assert!(Pace::new(1).limit(LEAST, u64::MAX) > ms(1 << 40));
}

#[test]
fn the_rate_is_measured_while_the_lane_is_busy() {
    let (start, mut pace) = (Instant::now(), Pace::new(100_000));
    // 1 MiB each 100 ms: 10 MiB/s, of which 4 MiB are always in flight.
    for i in 0..100 {
        pace.see(start + ms(i * 100), 4 * MIB, i * MIB);
    }
    let off = pace.rate().abs_diff(10 * MIB);
    assert!(off < MIB / 100, "{}", pace.rate());
    assert_eq!(pace.limit(LEAST, 4 * MIB).as_millis() / 10, 160);
    // Time without work does not count, and neither does the first look after it.
    pace.see(start + ms(10_000), 0, 104 * MIB);
    pace.see(start + ms(60_000), 4 * MIB, 104 * MIB);
    pace.see(start + ms(60_400), 4 * MIB, 108 * MIB);
    assert!(pace.rate().abs_diff(10 * MIB) < MIB / 100, "{}", pace.rate());
}

#[test]
fn a_mean_forgets_slowly_in_both_directions() {
    let (start, mut pace) = (Instant::now(), Pace::new(0));
    pace.see(start, MIB, 0);
    pace.see(start + ms(1000), MIB, 100 * MIB);
    assert_eq!(pace.rate(), 100 * MIB);
    pace.see(start + ms(2000), MIB, 120 * MIB);
    assert_eq!(pace.rate(), 80 * MIB);
    pace.see(start + ms(3000), MIB, 320 * MIB);
    assert_eq!(pace.rate(), 110 * MIB);
}

#[test]
fn a_rail_that_hangs_does_not_make_the_lane_look_slow() {
    let (start, mut pace) = (Instant::now(), Pace::new(100_000));
    let before = pace.limit(LEAST, 4 * MIB);
    // 4 MiB of another rail hang, while this one moves 4 KiB between two looks.
    for i in 0..8 {
        pace.see(start + ms(i * 62), 4 * MIB + 4096, i * 4096);
    }
    assert_eq!(pace.limit(LEAST, 4 * MIB), before);
}

#[test]
fn messages_one_by_one_do_not_make_the_lane_look_slow() {
    let (start, mut pace) = (Instant::now(), Pace::new(100_000));
    for i in 0..100 {
        pace.see(start + ms(i * 62), 4096, i * 60 * 4096);
    }
    assert_eq!(pace.rate(), 1_250_000_000);
    // They may show that it is faster.
    pace.see(start + ms(6200), 4096, 1 << 40);
    assert!(pace.rate() > 1_250_000_000);
}

#[test]
fn a_measurement_that_was_slept_through_is_dropped() {
    let (start, mut pace) = (Instant::now(), Pace::new(100_000));
    pace.see(start, 4 * MIB, 0);
    pace.restart();
    pace.see(start + ms(30_000), 4 * MIB, 4 * MIB);
    assert_eq!(pace.rate(), 1_250_000_000);
    pace.see(start + ms(30_100), 4 * MIB, 104 * MIB);
    assert_eq!(pace.rate(), 1000 * MIB);
}

#[test]
fn work_is_late_when_it_was_the_oldest_for_the_limit() {
    let (start, mut progress) = (Instant::now(), Progress::default());
    let mut late = |at, oldest| progress.is_late(start + ms(at), oldest, LEAST);
    assert!(!late(0, None));
    assert!(!late(600, Some(7)), "the clock starts when it is seen first");
    assert!(!late(1099, Some(7)));
    assert!(late(1100, Some(7)) && late(1101, Some(7)));
    // A completion.
    assert!(!late(1102, Some(8)));
    assert!(!late(1601, Some(8)));
    // Nothing in flight for a moment.
    assert!(!late(1602, None) && !late(1603, Some(8)) && !late(2102, Some(8)));
    assert!(late(2103, Some(8)));
}

#[test]
fn nobody_is_late_for_what_we_slept_through() {
    let start = Instant::now();
    let (mut gap, mut progress) = (Gap::new(), Progress::default());
    gap.meant = ms(62);
    // Looks at these times; the thread is stopped for 30 s in the middle.
    let mut failed = Vec::new();
    for at in [0, 62, 124, 30_124, 30_186, 30_400, 30_623, 30_624] {
        let now = start + ms(at);
        if gap.overslept(now, LEAST) {
            progress.restart(now);
        }
        if progress.is_late(now, Some(1), LEAST) {
            failed.push(at);
        }
    }
    assert_eq!(failed, [30_624]);
}

#[test]
fn a_sleep_that_was_meant_is_none_of_ours() {
    let (start, mut gap) = (Instant::now(), Gap::new());
    gap.meant = ms(250);
    assert!(!gap.overslept(start + ms(90_000), LEAST), "the first look");
    assert!(!gap.overslept(start + ms(90_500), LEAST));
    assert!(gap.overslept(start + ms(91_001), LEAST));
    assert!(!gap.overslept(start + ms(91_002), LEAST));
}

#[test]
fn an_idle_rail_is_asked_now_and_then_and_must_answer() {
    let (start, mut pulse) = (Instant::now(), Pulse::default());
    let mut look = |at, idle, asking| pulse.look(start + ms(at), (idle, asking), ms(1000), LEAST);
    assert_eq!(look(0, true, false), Care::Nothing);
    assert_eq!(look(999, true, false), Care::Nothing);
    assert_eq!(look(1000, true, false), Care::Ask);
    // It answers before the next look; a second later it is asked again.
    assert_eq!(look(1100, true, false), Care::Nothing);
    assert_eq!(look(2099, true, false), Care::Nothing);
    assert_eq!(look(2100, true, false), Care::Ask);
    // It does not answer.
    assert_eq!(look(2200, true, true), Care::Nothing);
    assert_eq!(look(2599, true, true), Care::Nothing);
    assert_eq!(look(2600, true, true), Care::Late);
}

#[test]
fn a_rail_in_doubt_is_asked_as_soon_as_it_is_idle_until_it_answers() {
    let (start, mut pulse) = (Instant::now(), Pulse::default());
    let look = |at, p: &mut Pulse, state| p.look(start + ms(at), state, ms(60_000), LEAST);
    assert_eq!(look(0, &mut pulse, (true, false)), Care::Nothing);
    pulse.hurry(start);
    assert_eq!(look(100, &mut pulse, (false, false)), Care::Nothing, "work has its own clock");
    assert_eq!(look(200, &mut pulse, (true, false)), Care::Ask);
    pulse.unasked();
    assert_eq!(look(300, &mut pulse, (true, false)), Care::Ask);
    assert_eq!((pulse.is_hurried(), pulse.take()), (true, false));
    assert_eq!(look(799, &mut pulse, (true, true)), Care::Nothing);
    assert_eq!(look(800, &mut pulse, (true, false)), Care::Nothing);
    assert_eq!((pulse.is_hurried(), pulse.take(), pulse.take()), (false, true, false));
    assert_eq!(look(60_799, &mut pulse, (true, false)), Care::Nothing);
    assert_eq!(look(60_800, &mut pulse, (true, false)), Care::Ask);
}

#[test]
fn a_question_under_way_has_the_short_time_from_the_doubt_on_and_an_older_answer_is_none() {
    let (start, mut pulse) = (Instant::now(), Pulse::default());
    let look = |at, p: &mut Pulse, asking| {
        let limit = if p.is_hurried() { LEAST } else { 2 * LEAST };
        p.look(start + ms(at), (true, asking), ms(1000), limit)
    };
    assert_eq!(look(0, &mut pulse, false), Care::Nothing);
    assert_eq!(look(1000, &mut pulse, false), Care::Ask);
    assert_eq!(look(1600, &mut pulse, true), Care::Nothing);
    pulse.hurry(start + ms(1600));
    assert_eq!(look(2099, &mut pulse, true), Care::Nothing);
    assert_eq!(look(2100, &mut pulse, true), Care::Late);
    // The look at which the doubt came saw an answer, which is from before perhaps.
    assert_eq!(look(2101, &mut pulse, false), Care::Nothing);
    pulse.hurry(start + ms(2101));
    assert_eq!(look(2200, &mut pulse, false), Care::Ask);
}

#[test]
fn only_work_that_got_done_counts_as_progress() {
    let (start, mut progress) = (Instant::now(), Progress::default());
    let mut look = |at, oldest| {
        progress.is_late(start + ms(at), oldest, LEAST);
        progress.take()
    };
    assert!(!look(0, None) && !look(100, Some(1)) && !look(200, Some(1)));
    assert!(look(300, Some(2)) && !look(400, Some(2)) && look(500, None) && !look(600, None));
}

#[test]
fn work_is_a_sign_of_life() {
    let (start, mut pulse) = (Instant::now(), Pulse::default());
    let mut look = |at, idle| pulse.look(start + ms(at), (idle, false), ms(1000), LEAST);
    for at in 0..50 {
        assert_eq!(look(at * 100, at % 5 == 0), Care::Nothing, "{at}");
    }
    assert_eq!(look(5900, true), Care::Ask);
}

#[test]
fn a_rail_is_never_asked_with_zero_and_again_when_it_could_not_be() {
    let (start, mut pulse) = (Instant::now(), Pulse::default());
    for at in 0..100 {
        let care = pulse.look(start + ms(at * 1000), (true, false), Duration::ZERO, LEAST);
        assert_eq!(care, Care::Nothing);
    }
    let mut pulse = Pulse::default();
    let look = |at, p: &mut Pulse| p.look(start + ms(at), (true, false), ms(1000), LEAST);
    look(0, &mut pulse);
    assert_eq!(look(1000, &mut pulse), Care::Ask);
    pulse.unasked();
    assert_eq!(look(1062, &mut pulse), Care::Ask);
    // An answer that we slept through is not late.
    pulse.restart(start + ms(30_000));
    let mut asked = |at| pulse.look(start + ms(at), (true, true), ms(1000), LEAST);
    assert_eq!(asked(30_000), Care::Nothing);
    assert_eq!(asked(30_500), Care::Late);
}

#[test]
fn the_nic_gives_up_within_what_the_documentation_says() {
    let c = crate::host::config::Config::default();
    let (nominal, worst) = acknowledgement(c.ack_timeout, c.retry);
    assert_eq!((nominal.as_micros(), worst.as_micros()), (469_762, 1_879_048));
    // The watchdog is the first where a NIC stretches its waits.
    let rail = ms(u64::from(c.rail_timeout_ms));
    assert!(nominal < rail && rail < worst);
    assert_eq!(acknowledgement(8, 0).0, Duration::from_nanos(4096 * 256));
    assert!(acknowledgement(u32::MAX, u32::MAX).1 > Duration::from_secs(500));
}

proptest! {
    /// No rail that completes something within the least limit is ever late, whatever the looks
    /// and sleeps of ours; and one that hangs is late at most a limit and a look after.
    #[test]
    fn only_silence_is_late(
        steps in prop::collection::vec((1..200u64, any::<bool>()), 1..200),
        load in 0..64 * MIB,
    ) {
        let (start, mut progress, pace) = (Instant::now(), Progress::default(), Pace::new(0));
        let limit = pace.limit(LEAST, load);
        let (mut at, mut oldest, mut since) = (0, 0, None);
        for (pause, done) in steps {
            at += pause;
            if done {
                oldest += 1;
                since = None;
            }
            let begun = *since.get_or_insert(at);
            let late = progress.is_late(start + ms(at), Some(oldest), limit);
            prop_assert_eq!(late, ms(at - begun) >= limit);
        }
    }

    /// The measured rate stays between the slowest and the fastest that was seen.
    #[test]
    fn a_rate_is_within_what_was_seen(
        steps in prop::collection::vec((1..500u64, MIB..64 * MIB), 2..100)
    ) {
        let (start, mut pace) = (Instant::now(), Pace::new(0));
        pace.see(start, MIB, 0);
        let (mut at, mut done, mut seen) = (0, 0, Vec::new());
        for (pause, bytes) in steps {
            at += pause;
            done += bytes;
            pace.see(start + ms(at), MIB, done);
            seen.push(bytes * 1000 / pause);
            let (low, high) = (seen.iter().min().unwrap(), seen.iter().max().unwrap());
            // Each step of the mean rounds down.
            prop_assert!(pace.rate() + 8 >= *low && pace.rate() <= *high + 1, "{}", pace.rate());
        }
    }
}
