BEGIN TRANSACTION;
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO "alembic_version" VALUES('0009');
CREATE TABLE audit (
	pk INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	who TEXT NOT NULL, 
	action VARCHAR(64) NOT NULL, 
	subject TEXT NOT NULL, 
	detail JSON DEFAULT '{}' NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (pk)
);
CREATE TABLE counters (
	name VARCHAR(32) NOT NULL, 
	value BIGINT NOT NULL, 
	CONSTRAINT pk_counters PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('change_id',0);
INSERT INTO "counters" VALUES('epoch',0);
INSERT INTO "counters" VALUES('uptime',0);
INSERT INTO "counters" VALUES('dataset',0);
CREATE TABLE datasets (
	pk INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	spec JSON NOT NULL, 
	spec_digest VARCHAR(64) NOT NULL, 
	capacity_trajectories BIGINT, 
	capacity_steps BIGINT, 
	capacity_bytes BIGINT, 
	description TEXT DEFAULT '' NOT NULL, 
	tags JSON DEFAULT '[]' NOT NULL, 
	next_seq BIGINT DEFAULT '1' NOT NULL, 
	evicted BIGINT DEFAULT '0' NOT NULL, 
	created_at FLOAT NOT NULL, 
	last_ingest_at FLOAT, 
	CONSTRAINT pk_datasets PRIMARY KEY (pk), 
	CONSTRAINT uq_datasets_name UNIQUE (name)
);
CREATE TABLE evaluations (
	pk INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	run VARCHAR(128), 
	policy TEXT NOT NULL, 
	env TEXT NOT NULL, 
	seeds JSON NOT NULL, 
	returns JSON NOT NULL, 
	lengths JSON DEFAULT '[]' NOT NULL, 
	episodes BIGINT NOT NULL, 
	dataset VARCHAR(64), 
	mean FLOAT NOT NULL, 
	iqm FLOAT NOT NULL, 
	ci_low FLOAT NOT NULL, 
	ci_high FLOAT NOT NULL, 
	confidence FLOAT NOT NULL, 
	normalised FLOAT, 
	details JSON DEFAULT '{}' NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_evaluations PRIMARY KEY (pk), 
	CONSTRAINT uq_evaluations_id UNIQUE (id)
);
CREATE TABLE jobs (
	pk INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	progress FLOAT DEFAULT '0' NOT NULL, 
	message TEXT DEFAULT '' NOT NULL, 
	payload JSON DEFAULT '{}' NOT NULL, 
	result JSON, 
	error JSON, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	finished_at FLOAT, 
	CONSTRAINT pk_jobs PRIMARY KEY (pk), 
	CONSTRAINT uq_jobs_id UNIQUE (id)
);
CREATE TABLE launches (
	pk INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	recipe TEXT DEFAULT '' NOT NULL, 
	args JSON DEFAULT '{}' NOT NULL, 
	count INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	claimed_by TEXT DEFAULT '' NOT NULL, 
	claimed_at FLOAT, 
	error TEXT DEFAULT '' NOT NULL, 
	run TEXT DEFAULT '' NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_launches PRIMARY KEY (pk), 
	CONSTRAINT uq_launches_id UNIQUE (id)
);
CREATE TABLE leases (
	snapshot_pk INTEGER NOT NULL, 
	holder TEXT NOT NULL, 
	expires_uptime FLOAT NOT NULL, 
	CONSTRAINT pk_leases PRIMARY KEY (snapshot_pk, holder), 
	CONSTRAINT fk_leases_snapshot_pk FOREIGN KEY(snapshot_pk) REFERENCES snapshots (pk)
);
CREATE TABLE metrics (
	run_pk INTEGER NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	step BIGINT NOT NULL, 
	time FLOAT NOT NULL, 
	value FLOAT, 
	CONSTRAINT pk_metrics PRIMARY KEY (run_pk, "key", step), 
	CONSTRAINT fk_metrics_run_pk FOREIGN KEY(run_pk) REFERENCES runs (pk)
)
 WITHOUT ROWID

;
CREATE TABLE partition_stats (
	dataset_pk INTEGER NOT NULL, 
	bucket VARCHAR(16) NOT NULL, 
	trajectories BIGINT DEFAULT '0' NOT NULL, 
	steps BIGINT DEFAULT '0' NOT NULL, 
	bytes BIGINT DEFAULT '0' NOT NULL, 
	return_sum FLOAT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_partition_stats PRIMARY KEY (dataset_pk, bucket), 
	CONSTRAINT ck_partition_stats_bucket CHECK (bucket IN ('fifo', 'protected', 'eval')), 
	CONSTRAINT fk_partition_stats_dataset_pk FOREIGN KEY(dataset_pk) REFERENCES datasets (pk)
);
CREATE TABLE policies (
	pk INTEGER NOT NULL, 
	run_pk INTEGER NOT NULL, 
	version BIGINT NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	file VARCHAR(128) NOT NULL, 
	bytes BIGINT NOT NULL, 
	step BIGINT, 
	metadata JSON DEFAULT '{}' NOT NULL, 
	created_at FLOAT NOT NULL, 
	verified_at FLOAT, 
	checksums BLOB NOT NULL, 
	CONSTRAINT pk_policies PRIMARY KEY (pk), 
	CONSTRAINT uq_policies_run_pk_version UNIQUE (run_pk, version), 
	CONSTRAINT fk_policies_run_pk FOREIGN KEY(run_pk) REFERENCES runs (pk)
);
CREATE TABLE policy_aliases (
	run_pk INTEGER NOT NULL, 
	alias VARCHAR(64) NOT NULL, 
	policy_pk INTEGER NOT NULL, 
	CONSTRAINT pk_policy_aliases PRIMARY KEY (run_pk, alias), 
	CONSTRAINT fk_policy_aliases_run_pk FOREIGN KEY(run_pk) REFERENCES runs (pk), 
	CONSTRAINT fk_policy_aliases_policy_pk FOREIGN KEY(policy_pk) REFERENCES policies (pk)
);
CREATE TABLE runs (
	pk INTEGER NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	config JSON DEFAULT '{}' NOT NULL, 
	parent VARCHAR(128), 
	seed BIGINT, 
	git_commit TEXT DEFAULT '' NOT NULL, 
	host TEXT DEFAULT '' NOT NULL, 
	snapshots JSON DEFAULT '[]' NOT NULL, 
	tags JSON DEFAULT '[]' NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	command TEXT DEFAULT '' NOT NULL, 
	error TEXT DEFAULT '' NOT NULL, 
	log TEXT DEFAULT '' NOT NULL, 
	created_at FLOAT NOT NULL, 
	heartbeat_at FLOAT NOT NULL, 
	finished_at FLOAT, 
	CONSTRAINT pk_runs PRIMARY KEY (pk), 
	CONSTRAINT uq_runs_name UNIQUE (name)
);
CREATE TABLE segments (
	pk INTEGER NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_segments PRIMARY KEY (pk), 
	CONSTRAINT ck_segments_state CHECK (state IN ('open', 'consumed', 'damaged')), 
	CONSTRAINT uq_segments_name UNIQUE (name)
);
CREATE TABLE shards (
	pk INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	dataset_pk INTEGER, 
	partition VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	bytes BIGINT NOT NULL, 
	rows BIGINT NOT NULL, 
	trajectories BIGINT NOT NULL, 
	seq_min BIGINT NOT NULL, 
	seq_max BIGINT NOT NULL, 
	created_at FLOAT NOT NULL, 
	retired_uptime FLOAT, 
	verified_at FLOAT, 
	checksums BLOB NOT NULL, 
	CONSTRAINT pk_shards PRIMARY KEY (pk), 
	CONSTRAINT ck_shards_partition CHECK (partition IN ('fifo', 'protected')), 
	CONSTRAINT ck_shards_state CHECK (state IN ('live', 'retired', 'deleting', 'deleted', 'quarantined')), 
	CONSTRAINT uq_shards_id UNIQUE (id), 
	CONSTRAINT fk_shards_dataset_pk FOREIGN KEY(dataset_pk) REFERENCES datasets (pk)
);
CREATE TABLE snapshot_shards (
	snapshot_pk INTEGER NOT NULL, 
	shard_pk INTEGER NOT NULL, 
	CONSTRAINT pk_snapshot_shards PRIMARY KEY (snapshot_pk, shard_pk), 
	CONSTRAINT fk_snapshot_shards_snapshot_pk FOREIGN KEY(snapshot_pk) REFERENCES snapshots (pk), 
	CONSTRAINT fk_snapshot_shards_shard_pk FOREIGN KEY(shard_pk) REFERENCES shards (pk)
);
CREATE TABLE snapshots (
	pk INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	selection JSON NOT NULL, 
	spec JSON NOT NULL, 
	datasets JSON NOT NULL, 
	file VARCHAR(128) NOT NULL, 
	trajectories BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	shards BIGINT NOT NULL, 
	bytes BIGINT NOT NULL, 
	added BIGINT, 
	removed BIGINT, 
	created_at FLOAT NOT NULL, 
	created_uptime FLOAT DEFAULT '0' NOT NULL, 
	base_pk INTEGER, 
	depth INTEGER DEFAULT '0' NOT NULL, 
	delta_rows BIGINT DEFAULT '0' NOT NULL, 
	excluded JSON DEFAULT '[]' NOT NULL, 
	checksums BLOB NOT NULL, 
	CONSTRAINT pk_snapshots PRIMARY KEY (pk), 
	CONSTRAINT uq_snapshots_id UNIQUE (id)
);
CREATE TABLE tokens (
	id VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	scopes JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	last_used_at FLOAT, 
	revoked_at FLOAT, 
	CONSTRAINT pk_tokens PRIMARY KEY (id)
);
CREATE TABLE tombstones (
	id VARCHAR(36) NOT NULL, 
	dataset_pk INTEGER NOT NULL, 
	seq BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	evicted_uptime FLOAT NOT NULL, 
	change_id BIGINT NOT NULL, 
	CONSTRAINT pk_tombstones PRIMARY KEY (id), 
	CONSTRAINT fk_tombstones_dataset_pk FOREIGN KEY(dataset_pk) REFERENCES datasets (pk)
);
CREATE TABLE trajectories (
	pk INTEGER NOT NULL, 
	id VARCHAR(36) NOT NULL, 
	dataset_pk INTEGER NOT NULL, 
	seq BIGINT NOT NULL, 
	partition VARCHAR(16) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	env TEXT NOT NULL, 
	length BIGINT NOT NULL, 
	return FLOAT NOT NULL, 
	terminated BOOLEAN NOT NULL, 
	truncated BOOLEAN NOT NULL, 
	final_obs_valid BOOLEAN NOT NULL, 
	success BOOLEAN, 
	purpose VARCHAR(8) NOT NULL, 
	policy TEXT NOT NULL, 
	run TEXT NOT NULL, 
	collector TEXT NOT NULL, 
	seed BIGINT, 
	episode_id TEXT NOT NULL, 
	first_step BIGINT NOT NULL, 
	tags TEXT DEFAULT '[]' NOT NULL, 
	flags TEXT DEFAULT '[]' NOT NULL, 
	notes TEXT DEFAULT '' NOT NULL, 
	source TEXT NOT NULL, 
	metrics TEXT DEFAULT '{}' NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	bytes BIGINT NOT NULL, 
	started_at FLOAT, 
	created_at FLOAT NOT NULL, 
	segment_pk INTEGER, 
	segment_offset BIGINT, 
	shard_pk INTEGER, 
	traj_idx INTEGER, 
	row_start BIGINT, 
	change_id BIGINT NOT NULL, 
	CONSTRAINT pk_trajectories PRIMARY KEY (pk), 
	CONSTRAINT uq_trajectories_dataset_pk_seq UNIQUE (dataset_pk, seq), 
	CONSTRAINT ck_trajectories_partition CHECK (partition IN ('fifo', 'protected')), 
	CONSTRAINT ck_trajectories_state CHECK (state IN ('spooled', 'sealed', 'evicted')), 
	CONSTRAINT ck_trajectories_purpose CHECK (purpose IN ('train', 'eval')), 
	CONSTRAINT uq_trajectories_id UNIQUE (id), 
	CONSTRAINT fk_trajectories_dataset_pk FOREIGN KEY(dataset_pk) REFERENCES datasets (pk), 
	CONSTRAINT fk_trajectories_segment_pk FOREIGN KEY(segment_pk) REFERENCES segments (pk), 
	CONSTRAINT fk_trajectories_shard_pk FOREIGN KEY(shard_pk) REFERENCES shards (pk)
);
CREATE TABLE workers (
	id VARCHAR(128) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	run VARCHAR(128), 
	host TEXT DEFAULT '' NOT NULL, 
	pid BIGINT, 
	policy TEXT DEFAULT '' NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	counters JSON DEFAULT '{}' NOT NULL, 
	last_error TEXT DEFAULT '' NOT NULL, 
	command VARCHAR(16) DEFAULT 'none' NOT NULL, 
	command_at FLOAT, 
	started_at FLOAT NOT NULL, 
	heartbeat_at FLOAT NOT NULL, 
	CONSTRAINT pk_workers PRIMARY KEY (id)
);
CREATE INDEX ix_snapshots_base_pk ON snapshots (base_pk);
CREATE INDEX ix_evaluations_policy ON evaluations (policy);
CREATE INDEX ix_evaluations_env ON evaluations (env);
CREATE INDEX ix_launches_state ON launches (state);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_audit_action_subject ON audit (action, subject);
CREATE INDEX ix_shards_dataset_pk ON shards (dataset_pk);
CREATE INDEX ix_shards_state ON shards (state);
CREATE INDEX ix_tombstones_dataset_pk ON tombstones (dataset_pk);
CREATE INDEX ix_tombstones_change_id ON tombstones (change_id);
CREATE INDEX ix_tombstones_evicted_uptime ON tombstones (evicted_uptime);
CREATE INDEX ix_leases_expires_uptime ON leases (expires_uptime);
CREATE INDEX ix_trajectories_fifo ON trajectories (dataset_pk, seq) WHERE partition = 'fifo' AND purpose = 'train' AND state <> 'evicted';
CREATE INDEX ix_trajectories_created_at ON trajectories (dataset_pk, created_at, seq) WHERE state <> 'evicted';
CREATE INDEX ix_trajectories_segment_pk ON trajectories (segment_pk);
CREATE INDEX ix_trajectories_return ON trajectories (dataset_pk, return) WHERE state <> 'evicted';
CREATE INDEX ix_trajectories_shard_pk ON trajectories (shard_pk);
CREATE INDEX ix_trajectories_length ON trajectories (dataset_pk, length, seq) WHERE state <> 'evicted';
CREATE INDEX ix_trajectories_change_id ON trajectories (change_id);
CREATE INDEX ix_trajectories_eval ON trajectories (dataset_pk, partition, seq) WHERE purpose = 'eval' AND state <> 'evicted';
CREATE INDEX ix_trajectories_dead ON trajectories (shard_pk, length) WHERE state = 'evicted';
CREATE INDEX ix_snapshot_shards_shard_pk ON snapshot_shards (shard_pk);
CREATE TRIGGER protected_update BEFORE UPDATE ON trajectories
        WHEN OLD.partition = 'protected' AND (
            NEW.state = 'evicted'
            OR (NEW.partition <> 'protected' AND NOT EXISTS (
                SELECT 1 FROM audit WHERE action = 'demote' AND subject = OLD.id)))
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never evicted'); END;
CREATE TRIGGER protected_delete BEFORE DELETE ON trajectories
        WHEN OLD.partition = 'protected'
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never deleted'); END;
CREATE TRIGGER protected_replace BEFORE INSERT ON trajectories
        WHEN EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.id AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories WHERE pk = NEW.pk AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories
                WHERE dataset_pk = NEW.dataset_pk AND seq = NEW.seq AND partition = 'protected')
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never replaced'); END;
CREATE TRIGGER living_shard BEFORE UPDATE OF state ON shards
        WHEN NEW.state IN ('retired', 'deleting', 'deleted') AND EXISTS (
            SELECT 1 FROM trajectories WHERE shard_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a shard that living trajectories need is never given up'); END;
CREATE TRIGGER living_segment BEFORE UPDATE OF state ON segments
        WHEN NEW.state = 'consumed' AND EXISTS (
            SELECT 1 FROM trajectories WHERE segment_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a segment that living trajectories need is never given up'); END;
COMMIT;
