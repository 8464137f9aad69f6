-- The views of a session, over the tables that it registers: _records, _exports, _windows, _commits, _attempts,
-- _producers, and, when a query first asks for them, _metrics and _payload. All have the column `run`; the session
-- shows these views without it when it holds one run, and without superseded rows unless asked for all attempts.

create schema log;

create view log.records as
select
    run, session, role, rank, world, record_id, time, "window", step, bound_by, attempt, epoch, tracker, key, kind,
    reduce_type, spread, denominator, denominator_id, "group", shape, dtype, present, count, nan, pos_inf, neg_inf,
    int_sum, sum, min, max, tags, superseded, complete
from _records;

comment on view log.records is 'What was recorded: a row per key and part of a window, for tensors and masks per call';
comment on column log.records.run is 'which of the session''s runs';
comment on column log.records.session is 'the recording process''s lifetime';
comment on column log.records.role is 'role of the process';
comment on column log.records.rank is 'its global rank';
comment on column log.records.world is 'the world of ranks it belongs to';
comment on column log.records.record_id is 'identity of the record within its session';
comment on column log.records.time is 'of the call; of the last one for scalars, timings and counters';
comment on column log.records."window" is 'what the process recorded between two exports, counted';
comment on column log.records.step is 'training step; null: bound to none';
comment on column log.records.bound_by is 'why that step: given, commit, export or time';
comment on column log.records.attempt is 'which lifetime of the run';
comment on column log.records.epoch is 'epoch of the step''s commit';
comment on column log.records.tracker is 'name of the tracker, '''' for the default one';
comment on column log.records.key is 'the key in full, tracker and scope included';
comment on column log.records.kind is 'stat, denominator, scalar, timing or counter';
comment on column log.records.reduce_type is 'how the key is exported; null for counters';
comment on column log.records.spread is 'how the values lie on the ranks: shards, replicated or shares';
comment on column log.records.denominator is 'key of the mask';
comment on column log.records.denominator_id is 'record id of the mask';
comment on column log.records."group" is 'the key''s own reduce group, its global ranks';
comment on column log.records.shape is 'shape as recorded, before selection; number of calls for scalars';
comment on column log.records.dtype is 'type as recorded';
comment on column log.records.present is '1: recorded at all';
comment on column log.records.count is 'selected values, non-finite ones included';
comment on column log.records.nan is 'NaNs among them';
comment on column log.records.pos_inf is '+Infs among them';
comment on column log.records.neg_inf is '-Infs among them';
comment on column log.records.int_sum is 'exact sum of counters and masks';
comment on column log.records.sum is 'sum of the finite values';
comment on column log.records.min is 'least finite value; +Inf when there is none';
comment on column log.records.max is 'greatest finite value; -Inf when there is none';
comment on column log.records.tags is 'what else is known, a JSON object: also what the mask''s tags say, under the record''s own';
comment on column log.records.superseded is 'a later attempt owns the step, or reported the key again';
comment on column log.records.complete is 'all records of the window are there';

create view log.exports as
select
    run, session, role, rank, world, time, "window", window_first, window_last, step, bound_by, attempt, epoch,
    export_id, members, tracker, key, reset, outcome, superseded, complete
from _exports;

comment on view log.exports is 'What each export covered and how it ended, a row per process and group';
comment on column log.exports.time is 'right after the collective';
comment on column log.exports."window" is 'the window it drained';
comment on column log.exports.window_first is 'the first window it covered: earlier ones were exported without reset';
comment on column log.exports.window_last is 'the last window it covered';
comment on column log.exports.export_id is 'the same on all members of the group';
comment on column log.exports.members is 'global ranks of the group; null: exported without one';
comment on column log.exports.tracker is 'the tracker that alone was exported; null: all';
comment on column log.exports.key is 'the key that alone was exported; null: all';
comment on column log.exports.reset is 'false: a later export covers the same records again';
comment on column log.exports.outcome is 'ok, or the class of the error';

create view log.windows as
select
    run, session, role, rank, world, "window", time, step, bound_by, attempt, epoch, records, superseded, complete
from _windows;

comment on view log.windows is 'Windows with the step they were bound to';
comment on column log.windows.time is 'of its newest record';
comment on column log.windows.records is 'how many of its records can be read';

create view log.commits as
select
    run, session, role, rank, world, "commit", time, attempt, leader, restored_step, epoch, epoch_step, global_step,
    sub_index, window_first, window_last, key, value, value_int, tags, superseded, beside
from _commits;

comment on view log.commits is 'Commits of every process: one row without a key each, then its metrics';
comment on column log.commits."commit" is 'counted within the session';
comment on column log.commits.leader is 'the committing process leads the attempt';
comment on column log.commits.restored_step is 'the last_commit_step its logger was restored with';
comment on column log.commits.epoch_step is 'step within the epoch';
comment on column log.commits.global_step is 'training step, zero-based';
comment on column log.commits.sub_index is 'position in a list commit, else 0';
comment on column log.commits.window_first is 'windows drained since the commit before; null: none';
comment on column log.commits.window_last is 'the last of them';
comment on column log.commits.value is 'the metric';
comment on column log.commits.value_int is 'the same, exactly, when it is an integer';
comment on column log.commits.superseded is 'a later commit or attempt replaced the row';
comment on column log.commits.beside is 'the leader, or else a lower rank, says this key of the step: no metric of the run';

create view log.attempts as
select
    run, attempt, started, ended, outcome, role, rank, session, host, resume_step, owned_from, commits, steps,
    superseded_steps
from _attempts;

comment on view log.attempts is 'Lifetimes of the run as a whole';
comment on column log.attempts.started is 'when it was claimed';
comment on column log.attempts.outcome is 'finished, exception: …, signal: …; unknown: killed; null: the newest one runs, or was killed';
comment on column log.attempts.host is 'the leader''s host';
comment on column log.attempts.session is 'the leader''s session';
comment on column log.attempts.commits is 'commits of the leader';
comment on column log.attempts.resume_step is 'resume point as given';
comment on column log.attempts.owned_from is 'first step that is its own; null: it only added';
comment on column log.attempts.steps is 'committed steps that count';
comment on column log.attempts.superseded_steps is 'committed steps that a later attempt replaced';

create view log.producers as
select
    run, session, role, rank, world, world_size, host, pid, started, last_seen, ended, windows, incomplete_windows,
    lost_rows, records_bytes, payload_bytes, commits_bytes
from _producers;

comment on view log.producers is 'Recording processes';
comment on column log.producers.world_size is 'how many ranks the world has';
comment on column log.producers.host is 'where it ran';
comment on column log.producers.pid is 'its process id there';
comment on column log.producers.started is 'start of its log';
comment on column log.producers.last_seen is 'last sign of life';
comment on column log.producers.ended is 'closed in order';
comment on column log.producers.windows is 'complete windows';
comment on column log.producers.incomplete_windows is 'windows with records missing or still to come';
comment on column log.producers.lost_rows is 'rows that the process itself could not write';
comment on column log.producers.records_bytes is 'size of its records on the disk';
comment on column log.producers.payload_bytes is 'size of its payload on the disk';
comment on column log.producers.commits_bytes is 'size of its commits on the disk';

create view log.metrics as
select run, step, key, value, time, attempt, sub_index, value_int, epoch, superseded from _metrics;

comment on view log.metrics is 'What was committed, a row per step and key';
comment on column log.metrics.key is 'exported name';
comment on column log.metrics.time is 'of the commit';

create view log.evaluations as
select run, step, key, value, time, attempt, sub_index, value_int, epoch, superseded
from _metrics
where starts_with(key, 'eval-rollout/');

comment on view log.evaluations is 'Metrics of the evaluation tracker';

create view log.payload as
select
    run, session, role, rank, world, "window", step, bound_by, attempt, epoch, record_id, "call", tracker, key, kind,
    denominator, denominator_id, shape, coalesce(values64, values32::double[]) as values, times, mask, selected,
    sample_ids, tags, sampled, counted, superseded, complete
from _payload;

comment on view log.payload is 'The values themselves, a row per record';
comment on column log.payload."call" is 'which call of the key in its window, 0 first: joins what one batch recorded';
comment on column log.payload.values is 'selected values in order; every call''s value of a scalar';
comment on column log.payload.times is 'every call''s time, of scalars, timings and counters';
comment on column log.payload.mask is 'the mask, a bit per element, lowest bit first';
comment on column log.payload.selected is 'selected values per sequence';
comment on column log.payload.sample_ids is 'ids of the samples';
comment on column log.payload.sampled is 'how many values were drawn at random; null: all are there';
comment on column log.payload.counted is 'pooled in the metric of its key and step: copies on other ranks are not';

create view log.tensors as
select
    run, step, key, rank, role, attempt, epoch, session, world, "window", "call", record_id, time, tracker, denominator,
    denominator_id, shape, coalesce(values64, values32::double[]) as values,
    _dense(coalesce(values64, values32::double[]), under, elements) as dense, tags, sampled, counted, superseded,
    complete
from _payload
where kind = 'stat';

comment on view log.tensors is 'Tensors, a row per call';
comment on column log.tensors.values is 'selected values in order';
comment on column log.tensors.dense is 'all elements in order, null where the mask did not select';

create view log.masks as
select
    run, step, key, rank, role, attempt, epoch, session, world, "window", "call", record_id, time, tracker, shape,
    _bits(mask, elements) as mask,
    coalesce(selected, list_transform(_bits(mask, elements), lambda b: b::bigint)) as selected, tags, counted,
    superseded, complete
from _payload
where kind = 'denominator';

comment on view log.masks is 'Denominators, a row per call';
comment on column log.masks.mask is 'a boolean per element';
comment on column log.masks.selected is 'selected elements per sequence';

create view log.scalars as
select
    run, step, key, rank, role, attempt, epoch, session, world, "window", record_id, tracker, kind,
    unnest(values64) as value, unnest(times) as time, tags, sampled, counted, superseded, complete
from _payload
where kind in ('scalar', 'timing', 'counter');

comment on view log.scalars is 'Scalars, timings and counters, a row per value';
comment on column log.scalars.time is 'of the call';

create view log.samples as
with each as (
    select *, sample_ids as ids, coalesce(values64, values32::double[]) as found
    from _payload where sample_ids is not null and kind != 'denominator'
    union all
    select *, whose as ids, _dense(coalesce(values64, values32::double[]), under, elements) as found
    from _payload
    where kind = 'stat' and len(whose) = elements  -- an element each, not packed sequences as many as their elements
        and (parts is null or list_min(parts) = 1 or (len(shape) > 1 and shape[1] = len(whose)))
), unnested as (
    select *, unnest(ids) as sample_id, unnest(found) as value from each
)
select
    run, step, key, rank, role, attempt, epoch, session, world, "window", "call", record_id, tracker, kind, sample_id,
    value, tags, counted, superseded, complete
from unnested
where value is not null;

comment on view log.samples is 'Values with the sample they belong to';
comment on column log.samples.sample_id is 'id of the sample the value belongs to';
comment on column log.samples.tags is 'what else is known of the sample or its batch, a JSON object';

create view log.keys as
select run, key, kind, reduce_type, sum(count)::bigint as count, min(step) as first_step, max(step) as last_step
from _records
where not superseded
group by all
union all
select run, key, 'metric', null, count(*), min(step), max(step)
from _metrics
where not superseded
group by all
order by run, key, kind, reduce_type;

comment on view log.keys is 'What was recorded and, of kind metric, what was committed';
comment on column log.keys.count is 'selected values; of metrics, rows';
comment on column log.keys.first_step is 'first step that counts';
comment on column log.keys.last_step is 'last step that counts';

-- Statistics as table macros: `from percentile('ppo_actor/advantages', 0.99)`. They mean what the exported numbers
-- mean: the ranks that count are pooled, one NaN makes a statistic NaN, Inf follows IEEE, nothing selected is null,
-- and everything is added in a fixed order. A view of the same name tells (and documents) the columns of each.

-- A key of null is looked for as '', which is none: of `key = null` there are no rows, and so no error. One that is
-- no text is looked for as one: else the keys would be cast to what it is.
create macro log._known(wanted) as (
    select case when count(*) = 0
        then error('expected a recorded key, got ' || coalesce(chr(39) || wanted || chr(39), 'null')) else true end
    from _records where key = wanted::varchar
);

create macro log._valued(wanted, kind) as (
    if(kind != 'denominator', true, error('expected a key with values, got the mask ' || chr(39) || wanted || chr(39) ||
    ': see by_rank and the view masks'))
);

create macro log._sequenced(wanted) as (
    select case
        when not log._known(wanted) then false
        when bool_or(kind != 'stat' and log._valued(wanted, kind)) then error('expected a key recorded under a mask, ' ||
            'which has sequences, got ' || chr(39) || wanted || chr(39) || ', which is a scalar')
        else true end
    from _records where key = wanted::varchar
);

-- Whether a key has values to pool. What a statistic is given comes from here, so that this error is the first.
create macro log._poolable(wanted) as (
    select case
        when not log._known(wanted) then false
        when bool_or(log._valued(wanted, kind) and spread = 'shares') then error('expected a key whose values are pooled, got ' || chr(39) || wanted ||
            chr(39) || ', whose values are shares of one number: see by_rank and by_sequence')
        else true end
    from _records where key = wanted::varchar
);

create macro log._whole(sampled) as (
    if(sampled is null, true, error('expected all values of the key, got samples of them: see the view tensors'))
);

create macro log._total(sum, nan, pos_inf, neg_inf) as (
    case
        when nan > 0 or (pos_inf > 0 and neg_inf > 0) then 'nan'::double
        when pos_inf > 0 then 'inf'::double
        when neg_inf > 0 then '-inf'::double
        else sum
    end
);

create macro log.percentile(wanted, q) as table
with kept as (
    select
        p.run, p.step,
        _quantile(
            flatten(list(coalesce(v.values64, v.values32::double[]) order by session, record_id)),
            (select if(log._poolable(wanted), q::double, 0))
        ) as value,
        sum(len(coalesce(v.values64, v.values32::double[])))::bigint as count
    from _payload as v join _pooled as p using (run, session, record_id)
    where v.key = wanted::varchar and v.counted and log._whole(v.sampled) and p.key = wanted::varchar
    group by p.run, p.step
), recorded as (
    select run, step, sum(count)::bigint as count, bool_and(whole) as whole
    from _pooled
    where key = coalesce(wanted::varchar, '') and log._poolable(wanted)
    group by run, step
)
select
    r.run, r.step, k.value, coalesce(k.count, 0) as count,
    if(r.whole, r.count - coalesce(k.count, 0), null) as missing
from recorded as r left join kept as k on r.run = k.run and r.step is not distinct from k.step
order by r.run, r.step;

create view log."percentile('key', 0.99)" as from log.percentile('', 0.99);
comment on view log."percentile('key', 0.99)" is 'An exact percentile of a recorded key by step';
comment on column log."percentile('key', 0.99)".step is 'training step';
comment on column log."percentile('key', 0.99)".value is 'interpolated between neighbours; NaN where any value is';
comment on column log."percentile('key', 0.99)".count is 'values that it is of';
comment on column log."percentile('key', 0.99)".missing is 'values that were recorded but are not kept: it is not of them; null: a rank''s part is not in the log';

create macro log._histogram(wanted, bins) as table
with ends as (
    select min(low) as low, max(high) as high
    from (
        select min as low, max as high from _pooled where key = wanted::varchar and kind != 'counter'
        union all
        select list_min(values64), list_max(values64) from _payload
        where key = wanted::varchar and kind = 'counter' and counted
    )
), edges as (
    select _edges(low, high, if(log._poolable(wanted), bins::bigint, 0)) as edges from ends
), binned as materialized (
    select
        run, len(coalesce(values64, values32::double[])) as found,
        _counts(
            coalesce(values64, values32::double[]), (select low from ends), (select high from ends),
            (select len(edges) - 1 from edges)
        ) as n
    from _payload
    where key = wanted::varchar and counted and log._whole(sampled)
), numbered as (
    select run, unnest(n) as n, generate_subscripts(n, 1) as bin from binned
), filled as (
    select run, bin, sum(n)::bigint as count from numbered group by run, bin
), kept as (
    select run, sum(found)::bigint as count from binned group by run
), each as (  -- once, though records of an export without reset count for several steps
    select run, session, record_id, any_value(count) as count, bool_and(whole) as whole
    from _pooled
    where key = coalesce(wanted::varchar, '') and log._poolable(wanted)
    group by run, session, record_id
), recorded as (
    select run, sum(count)::bigint as count, bool_and(whole) as whole from each group by run
)
select
    run, bin, (select edges from edges)[bin] as "left", (select edges from edges)[bin + 1] as "right",
    coalesce(filled.count, 0) as count,
    if(recorded.whole, recorded.count - coalesce(kept.count, 0), null) as missing
from recorded
cross join (select unnest(range(1, len(edges))) as bin from edges)
left join filled using (run, bin)
left join kept using (run)
order by run, bin;

create view log."histogram('key', 50)" as from log._histogram('', 50);
comment on view log."histogram('key', 50)" is 'How many values of a recorded key lie in each of some equal bins';
comment on column log."histogram('key', 50)".bin is '1, 2, 3 …, from the least finite value to the greatest';
comment on column log."histogram('key', 50)"."left" is 'lower edge, included';
comment on column log."histogram('key', 50)"."right" is 'upper edge, included in the last bin only';
comment on column log."histogram('key', 50)".count is 'finite values between the edges';
comment on column log."histogram('key', 50)".missing is 'values that were recorded but are not kept: they are in no bin; null: a rank''s part is not in the log';

create macro log.by_rank(wanted) as table
with merged as (
    select
        run, step, role, rank, superseded, sum(count)::bigint as count, sum(nan)::bigint as nan,
        sum(pos_inf)::bigint as pos_inf, sum(neg_inf)::bigint as neg_inf,
        sum(sum order by session, record_id) as total, min(min) as low, max(max) as high
    from _records
    where key = coalesce(wanted::varchar, '') and complete and step is not null and log._known(wanted)
    group by run, step, role, rank, superseded
)
select
    run, step, role, rank, count, if(count > 0, log._total(total, nan, pos_inf, neg_inf) / count, null) as avg,
    log._total(total, nan, pos_inf, neg_inf) as sum,
    case when count = 0 then null when nan > 0 then 'nan'::double when neg_inf > 0 then '-inf'::double
        when low <= high or pos_inf > 0 then low end as min,
    case when count = 0 then null when nan > 0 then 'nan'::double when pos_inf > 0 then 'inf'::double
        when low <= high or neg_inf > 0 then high end as max,
    nan + pos_inf + neg_inf as nonfinite, superseded
from merged
order by run, step, role, rank, superseded;

create view log."by_rank('key')" as from log.by_rank('');
comment on view log."by_rank('key')" is 'A recorded key by step and rank, every process for itself; from the moments alone';
comment on column log."by_rank('key')".avg is 'mean of the selected values; null where none is';
comment on column log."by_rank('key')".sum is 'sum of the selected values';
comment on column log."by_rank('key')".min is 'least selected value; null of counters and masks';
comment on column log."by_rank('key')".max is 'greatest selected value; null of counters and masks';
comment on column log."by_rank('key')".nonfinite is 'NaNs and Infs among them';

create macro log.by_sequence(wanted) as table
with kept as (
    select
        run, session, record_id, whose,
        _sequences(coalesce(values64, values32::double[]), parts, under, elements) as sequences
    from _payload
    where key = wanted::varchar and counted and log._whole(sampled)
), each as (
    select r.*, k.whose, unnest(coalesce(k.sequences, [null])) as s
    from _pooled as r left join kept as k using (run, session, record_id)
    where r.key = coalesce(wanted::varchar, '') and log._sequenced(wanted)
)
select
    run, step, role, rank, "window", "call", s.sequence as sequence, whose[s.sequence + 1] as sample_id,
    s.count as count, s.avg as avg, s.sum as sum, s.min as min, s.max as max,
    if(s is null, each.count, 0) as missing
from each
order by run, step, role, rank, "window", "call", sequence;

create view log."by_sequence('key')" as from log.by_sequence('');
comment on view log."by_sequence('key')" is 'A recorded tensor by sequence: of the leading dimension, or of cu_seqlens';
comment on column log."by_sequence('key')"."call" is 'which call of the key in its window, 0 first';
comment on column log."by_sequence('key')".sequence is 'which sequence of the call, 0 first; null: the call''s values are not kept';
comment on column log."by_sequence('key')".sample_id is 'its id, where ids were given';
comment on column log."by_sequence('key')".avg is 'mean of the selected values; null where none is';
comment on column log."by_sequence('key')".sum is 'sum of the selected values';
comment on column log."by_sequence('key')".min is 'least selected value';
comment on column log."by_sequence('key')".max is 'greatest selected value';
comment on column log."by_sequence('key')".missing is 'values that were recorded but are not kept, where there is no sequence';
